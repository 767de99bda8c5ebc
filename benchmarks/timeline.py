"""Time what the timeline costs a step: the host's work with it on and off, in turn, no device in between.

    python benchmarks/timeline.py

Prints microseconds a decode step, the median over the steps of each kind. A step that a model computes takes its own
time beside: the share that the timeline costs is the difference over that.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from host import idle_engine

from minivllm import SamplingParams


def measure(num_slots: int, steps: int, changing: bool) -> tuple[float, float]:
    """Return the median microseconds of a decode step, off and on, every slot in use.

    With ``changing`` the timeline finds other rows in each step, as where requests come and go all the time.
    """
    engine = idle_engine(num_slots, 64, num_slots * 64, 4096)
    rng = np.random.default_rng(0)
    for _ in range(num_slots):
        engine.submit(rng.integers(0, 1000, 128).tolist(), SamplingParams(max_tokens=3900, ignore_eos=True))
    while any(slot.phase != "decode" for slot in engine.slots):
        engine.step()
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(steps):
        engine.timeline.enabled = bool(i % 2)
        if changing:
            engine.timeline._decoding = None
        start = time.perf_counter()
        engine.step()
        times[engine.timeline.enabled].append((time.perf_counter() - start) * 1e6)
    engine.close()
    return statistics.median(times[False]), statistics.median(times[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="steps measured (default: 3000)")
    args = parser.parse_args()
    print("slots  rows      off (us)  on (us)  difference (us)")
    for num_slots in (1, 8, 256):
        for changing in (False, True):
            off, on = measure(num_slots, args.steps, changing)
            rows = "changing" if changing else "the same"
            print(f"{num_slots:5}  {rows}  {off:8.1f}  {on:7.1f}  {on - off:15.1f}")


if __name__ == "__main__":
    main()
