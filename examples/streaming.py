"""Print answers as they come, and stop one early.

    python examples/streaming.py [MODEL]

MODEL is a directory in the Hugging Face layout or a hub id; without it, the demo model (see demo_model.py).
"""

from __future__ import annotations

from demo_model import chosen_model

from minivllm import BatchEngine, SamplingParams


def main() -> None:
    with BatchEngine(chosen_model(1), num_slots=2) as engine:
        # One prompt: each delta holds what is new of the text.
        for delta in engine.stream("The three primary colours are", SamplingParams(max_tokens=24)):
            print(delta.text, end="", flush=True)
        print("\n")

        # Several prompts at once: delta.index says which one goes on.
        texts = ["", ""]
        for delta in engine.stream(["One, two, three,", "Monday, Tuesday,"], SamplingParams(max_tokens=12)):
            texts[delta.index] += delta.text
            if delta.finish_reason is not None:
                print(f"{delta.index}: {texts[delta.index]!r} ({delta.finish_reason})")

        # Leaving early: closing the stream cancels what has not ended and frees its slot.
        with engine.stream("Once upon a time", SamplingParams(max_tokens=500)) as stream:
            text = ""
            for delta in stream:
                text += delta.text
                if len(text) > 40:
                    break
        print(f"stopped after {text!r}; {engine.stats.running} requests are running")


if __name__ == "__main__":
    main()
