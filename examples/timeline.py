"""Run more prompts than there are slots and draw who was where when.

    python examples/timeline.py [FOLDER] [MODEL]

Writes trace.json, which https://ui.perfetto.dev opens, and timeline.png into FOLDER. The picture needs
matplotlib, which `pip install '.[plot]'` brings.
"""

from __future__ import annotations

import sys
from pathlib import Path

from demo_model import chosen_model

from minivllm import BatchEngine, SamplingParams

STORY = "A long time ago a ship sailed from the harbour with twelve sailors, a cat and a map that nobody could read. "
PROMPTS = [
    "The largest planet is",
    STORY * 6 + "The cat",
    "Water boils at",
    STORY * 3 + "The map",
    "In the year 1969",
    "A poem about rain:",
    STORY * 9 + "The captain",
    "The opposite of hot is",
]
LENGTHS = [20, 12, 30, 16, 24, 34, 18, 8]  # tokens that each may draw


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    # Few tokens a step, so that long prompts are cut into chunks and the others decode beside them.
    with BatchEngine(chosen_model(2), num_slots=3, max_step_tokens=48) as engine:
        engine.generate(PROMPTS, [SamplingParams(max_tokens=n, ignore_eos=True) for n in LENGTHS])
        steps = list(engine.timeline)
        stats = engine.stats
        print(f"{len(steps)} steps: {stats.prompt_tokens} prompt tokens computed, {stats.cached_tokens} cached")
        engine.timeline.save(folder / "trace.json")
        print(f"see {folder / 'trace.json'}")
        try:
            figure = engine.timeline.plot()
        except ImportError as error:  # of the extra
            sys.exit(f"no timeline.png: {error}")
        figure.savefig(folder / "timeline.png", dpi=120)
        print(f"and {folder / 'timeline.png'}")


if __name__ == "__main__":
    main()
