"""Chat with a model in the terminal; an empty line ends it.

    python examples/chat.py [MODEL]

The whole conversation goes in again each time. Its beginning is found in the prefix cache, so only what is new is
computed; the line under each answer says how much that saved.
"""

from __future__ import annotations

from demo_model import chosen_model

from minivllm import BatchEngine, SamplingParams


def main() -> None:
    params = SamplingParams(max_tokens=200, temperature=0.7, top_p=0.9)
    with BatchEngine(chosen_model(1), num_slots=1) as engine:
        messages = [{"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."}]
        while True:
            try:
                question = input("> ")
            except EOFError:
                break
            if not question:
                break
            messages.append({"role": "user", "content": question})
            handle = engine.submit(engine.tokenizer.apply_chat_template(messages), params)
            for delta in handle:
                print(delta.text, end="", flush=True)
            answer = handle.result()
            messages.append({"role": "assistant", "content": answer.text})
            stats = answer.stats
            prompt = len(answer.prompt_token_ids)
            print(f"\n  [{stats.cached_tokens} of {prompt} prompt tokens cached, first token {stats.ttft:.2f} s]\n")


if __name__ == "__main__":
    main()
