"""Talk to a running server through the openai package.

    minivllm serve MODEL &
    python examples/server_client.py [http://127.0.0.1:8000]

Needs `pip install openai`. The key, where the server wants one, comes from MINIVLLM_API_KEY.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

try:
    import openai
except ImportError:
    sys.exit("this example needs the openai package: pip install openai")

QUESTIONS = ["What is the capital of France?", "How many legs has a spider?", "What colour is grass?"]


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    key = os.environ.get("MINIVLLM_API_KEY", "unused")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        model = client.models.list().data[0].id
        print(f"the server has {model}")

        # A stream: chunks come as tokens do.
        messages = [{"role": "user", "content": "Count to five."}]
        stream = client.chat.completions.create(model=model, messages=messages, max_tokens=24, stream=True)
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print("\n")

        # Many at once: the server puts them into slots, the client only waits.
        def ask(question: str) -> str:
            messages = [{"role": "user", "content": question}]
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
            return answer.choices[0].message.content.strip()

        with ThreadPoolExecutor(8) as pool:
            for question, answer in zip(QUESTIONS, pool.map(ask, QUESTIONS), strict=True):
                print(f"Q: {question}\nA: {answer}\n")


if __name__ == "__main__":
    main()
