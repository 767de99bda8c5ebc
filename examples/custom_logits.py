"""Change the logits with a function of your own: an answer that must be one of a few.

    python examples/custom_logits.py [MODEL]

A `logits_fn` gets all tokens so far and a float32 tensor of the vocabulary's size, and changes it in place. It runs on
the host before every token of its request, which makes the engine wait for it; requests without one do not mind.
"""

from __future__ import annotations

import math

import torch
from demo_model import chosen_model

from minivllm import BatchEngine, SamplingParams

QUESTIONS = ["Is fire hot?", "Is ice hot?", "Can fish sing opera?"]


class Choices:
    """Allow only tokens that go on with one of these texts, then the end token."""

    def __init__(self, engine: BatchEngine, texts: list[str], prompt_length: int) -> None:
        self.end = engine.config.eos_token_ids[0]
        begin = len(engine.tokenizer.encode(""))  # tokens that some tokenizers put before every text
        self.options = [engine.tokenizer.encode(text)[begin:] for text in texts]
        self.prompt_length = prompt_length

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> None:
        answer = token_ids[self.prompt_length :]
        after = [option[len(answer) :] for option in self.options if option[: len(answer)] == answer]
        allowed = {rest[0] if rest else self.end for rest in after}
        blocked = torch.ones(len(logits), dtype=torch.bool)
        blocked[list(allowed)] = False
        logits[blocked] = -math.inf


def main() -> None:
    with BatchEngine(chosen_model(1), num_slots=3) as engine:
        prompts, params = [], []
        for question in QUESTIONS:
            messages = [{"role": "user", "content": f"{question} Answer yes, no or it depends."}]
            prompt = engine.tokenizer.apply_chat_template(messages)
            choices = Choices(engine, ["Yes", "No", "It depends"], len(prompt))
            prompts.append(prompt)
            params.append(SamplingParams(max_tokens=8, logits_fn=choices, logprobs=0))
        for question, answer in zip(QUESTIONS, engine.generate(prompts, params), strict=True):
            first = answer.logprobs[0][answer.token_ids[0]]
            print(f"{question:22} {answer.text:12} (by itself it began so with {math.exp(first.logprob):.0%})")


if __name__ == "__main__":
    main()
