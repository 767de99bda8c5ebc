"""Answer a JSONL file of prompts into another.

    python examples/batch_jsonl.py IN.jsonl OUT.jsonl [MODEL]

A line of IN is {"prompt": TEXT or TOKEN IDS} and may name sampling parameters beside ("max_tokens": 50). Prompts that
cannot be served are answered with an error; the others run. Parameters that do not exist end it before it begins.
`minivllm generate` does the same and more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from demo_model import chosen_model

from minivllm import BatchEngine, SamplingParams


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    jobs = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [job.pop("prompt") for job in jobs]
    try:
        params = [SamplingParams(**{"max_tokens": 32, **job}) for job in jobs]
    except (TypeError, ValueError) as error:
        sys.exit(f"{source}: {error}")

    with BatchEngine(chosen_model(3)) as engine:
        answers = engine.generate(prompts, params, on_error="return", progress=True)
        with target.open("w", encoding="utf-8") as out:
            for prompt, answer in zip(prompts, answers, strict=True):
                line = {"prompt": prompt, "text": answer.text, "finish_reason": answer.finish_reason}
                if answer.error is not None:
                    line["error"] = answer.error
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(f"{len(answers)} answers in {target}, {sum(a.error is not None for a in answers)} of them errors")


if __name__ == "__main__":
    main()
