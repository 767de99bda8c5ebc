"""Ask a small model four questions through two slots, and watch the slots.

    python examples/quickstart.py [MODEL]

MODEL is a directory in the Hugging Face layout or a hub id; without it, the demo model (see demo_model.py).
"""

from __future__ import annotations

import time

from demo_model import chosen_model

from minivllm import BatchEngine, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "What is gravity?",
    "Name three fruits.",
    "How many days are there in a week?",
]
WIDTH = 72  # columns of the picture at the end


def changes(before: list, after: list, ended: list) -> list[str]:
    """Say in words what a step did to the slots."""
    words = []
    for answer in ended:
        where = next((f" leaves slot {v.slot}" for v in before if v.request_id == answer.request_id), "")
        words.append(f"prompt {answer.request_id}{where} ({answer.finish_reason}, {len(answer.token_ids)} tokens)")
    for old, new in zip(before, after, strict=True):
        if new.request_id not in (None, old.request_id):
            cached = f" ({new.cached_tokens} tokens cached)" if new.cached_tokens else ""
            words.append(f"prompt {new.request_id} takes slot {new.slot}, blocks {list(new.blocks)}{cached}")
    return words


def picture(history: list[list]) -> str:
    """Draw a line a slot: the number of the prompt that held it, over the steps."""
    columns = [history[i * len(history) // WIDTH] for i in range(WIDTH)]
    lines = []
    for slot in range(len(history[0])):
        held = (column[slot].request_id for column in columns)
        lines.append(f"  slot {slot}  " + "".join("." if r is None else str(r) for r in held))
    return "\n".join(lines)


def main() -> None:
    with BatchEngine(chosen_model(1), num_slots=2) as engine:
        print(f"{engine}\n")
        prompts = [engine.tokenizer.apply_chat_template([{"role": "user", "content": q}]) for q in QUESTIONS]
        handles = [engine.submit(prompt, SamplingParams(max_tokens=96)) for prompt in prompts]

        # What engine.chat(...) does, one step at a time.
        start, history, slots = time.perf_counter(), [], engine.slots
        while not all(handle.done for handle in handles):
            ended = engine.step()
            before, slots = slots, engine.slots
            history.append(slots)
            if words := changes(before, slots, ended):
                print(f"step {len(history):3}: {'; '.join(words)}; {len(engine.queue)} in the queue")
        seconds = time.perf_counter() - start

        drawn = f"{len(history)} steps" if len(history) <= WIDTH else f"{len(history)} steps in {WIDTH} columns"
        print(f"\n{drawn}, left to right: which prompt had the slot, or . where it was free")
        print(f"{picture(history)}\n")
        answers = [handle.result() for handle in handles]
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"Q: {question}\nA: {answer.text.strip()}\n")
        tokens = sum(len(answer.token_ids) for answer in answers)
        print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s on {engine.device}")


if __name__ == "__main__":
    main()
