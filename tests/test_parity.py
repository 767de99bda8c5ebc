"""Greedy answers in float32 are those of transformers."""

from __future__ import annotations

import random

import pytest
import torch
from engines import assert_empty, greedy, tiny_engine
from tiny import tiny_model

from minivllm.engine import BatchEngine
from minivllm.request import SamplingParams

B = 4
LENGTHS = range(1, 3 * B + 2)
DRAWN = 10


def some_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, 320) for _ in range(n)] for n in LENGTHS]


def reference(path, prompts: list[list[int]], count: int, end: int | None = None) -> list[list[int]]:
    """Return transformers' greedy tokens, each prompt by itself; up to the end token where there is one."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=end,
            pad_token_id=0,
            repetition_penalty=1.0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


FAMILIES = {
    "Llama": ("LlamaForCausalLM", {}),
    "Llama, tied, four query heads a key head": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "Mistral": ("MistralForCausalLM", {}),
    "Qwen2": ("Qwen2ForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(tmp_path, device, family):
    architecture, fields = FAMILIES[family]
    path = tiny_model(tmp_path, architecture, tokenizer=False, **fields)
    prompts = some_prompts()
    want = reference(path, prompts, DRAWN)
    assert len({tuple(w) for w in want}) > 10, "the answers differ enough to tell anything"
    with tiny_engine(path, device, num_slots=4, dtype="float32") as engine:
        together = engine.generate(prompts, greedy(DRAWN))  # more prompts than slots
        assert [g.token_ids for g in together] == want
        singly = [engine.generate([p], greedy(DRAWN))[0].token_ids for p in prompts]
        assert singly == want
        assert_empty(engine)
    with tiny_engine(path, device, num_slots=4, dtype="float32", max_step_tokens=21, num_blocks=8) as engine:
        pressed = engine.generate(prompts, greedy(DRAWN))
        assert [g.token_ids for g in pressed] == want
        assert engine.stats.preemptions > 0


QUESTIONS = [
    "What is 2+2?",
    "What is the capital of France?",
    "Name three colours.",
    "Who wrote Romeo and Juliet?",
    "Why is the sky blue? Answer in one sentence.",
    "Translate 'good morning' to Spanish.",
    "Write a haiku about the sea.",
    "How many legs does a spider have?",
]


@pytest.mark.time_limit(400)
def test_the_demo_model_answers_as_in_transformers(demo_model, device):
    with BatchEngine(demo_model, device=device, dtype="float32", num_slots=7, num_blocks=60) as engine:
        conversations = [[{"role": "user", "content": q}] for q in QUESTIONS]
        answers = engine.chat(conversations, greedy(48))
        plain = engine.chat(conversations, SamplingParams(max_tokens=48))
        assert_empty(engine)
    want = reference(demo_model, [g.prompt_token_ids for g in answers], 48)
    assert [g.token_ids for g in answers] == want
    for short, long in zip(plain, answers, strict=True):  # and to the end token by itself
        assert short.token_ids == long.token_ids[: len(short.token_ids)]
    assert "Paris" in plain[1].text and plain[1].finish_reason == "stop"
