"""Time the host's work of a step: scheduling, packing, bookkeeping, with a forward pass that does nothing.

    python benchmarks/host.py

Prints microseconds a decode step at 1 to 256 slots, the median over the steps of several runs; and for prompts that
fill steps of 8,192 tokens what a device waits for before the first step, what a later step takes while it works, and
what is left to do after the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from pathlib import Path
from typing import cast

import numpy as np
import torch

from minivllm import SamplingParams
from minivllm.batch import Batch, Ints
from minivllm.block_pool import BlockPool
from minivllm.defaults import Sizes
from minivllm.engine import BatchEngine
from minivllm.runner import Runner
from minivllm.ticket import Ticket


class IdleRunner:
    """Stand in for the device: packs each batch as the real one does and draws token 7 for every row."""

    overlap = True

    def __init__(self, size: int) -> None:
        self._views = [np.zeros(size, np.int32) for _ in range(4)]
        self._turn = 0
        self.launched: list[float] = []  # when each step was ready for the device
        self.collected = 0.0  # when the last one was asked for

    def launch(self, batch: Batch) -> Ticket:
        """Pack the batch into a host buffer."""
        self._turn = (self._turn + 1) % 4
        batch.pack(self._views[self._turn], batch.num_rows, self._turn)
        self.launched.append(time.perf_counter())
        return Ticket(batch, torch.empty(0), None)

    def collect(self, ticket: Ticket) -> Ints:
        """Return a token a row."""
        self.collected = time.perf_counter()
        return np.full(ticket.batch.num_rows, 7, np.int32)

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """Nothing is held."""


def idle_engine(num_slots: int, block_size: int, num_blocks: int, max_seq_len: int) -> BatchEngine:
    """Return an engine without a model, a tokenizer or a device."""
    engine = BatchEngine.__new__(BatchEngine)
    engine.sizes = Sizes(num_slots, block_size, num_blocks, max_seq_len, 8192)
    engine.device, engine.seed, engine.tokenizer = torch.device("cpu"), 0, None
    engine.config = cast("object", _Config())  # type: ignore[assignment]
    runner = cast(Runner, IdleRunner(1 << 20))
    engine._begin(runner, BlockPool(num_blocks, block_size, caching=True))
    return engine


PREFILLS = ((1, 8192), (32, 1024), (256, 128))  # prompts, and tokens of each


class _Config:
    vocab_size = 128256
    eos_token_ids = (128001, 128008, 128009)
    architecture = "none"


def measure(num_slots: int, steps: int) -> float:
    """Return the median microseconds of a decode step with every slot in use, blocks of 64 tokens."""
    engine = idle_engine(num_slots, 64, num_slots * 64, 4096)
    params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
    rng = np.random.default_rng(0)
    handles = deque(engine.submit(rng.integers(0, 1000, 128).tolist(), params) for _ in range(num_slots))
    while any(slot.phase != "decode" for slot in engine.slots):
        engine.step()
    times = []
    for _ in range(steps - 16):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    for handle in handles:
        handle.cancel()
    engine.check_integrity()
    return statistics.median(times) * 1e6


def measure_prefill(count: int, length: int, runs: int = 9) -> tuple[float, float, float]:
    """Return the median microseconds before the first step, between two steps, and after the last one's end."""
    engine = idle_engine(256, 64, 8192, 16384)
    runner = cast(IdleRunner, engine._runner)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    rng = np.random.default_rng(0)
    first, between, last = [], [], []
    for _ in range(runs):
        prompts = rng.integers(0, 128000, (count, length)).tolist()
        runner.launched.clear()
        start = time.perf_counter()
        engine.generate(prompts, params)
        last.append(time.perf_counter() - runner.collected)
        first.append(runner.launched[0] - start)
        between += np.diff(runner.launched).tolist()
    engine.check_integrity()
    return tuple(statistics.median(times or [0.0]) * 1e6 for times in (first, between, last))  # type: ignore[return-value]


def main() -> None:
    """Measure, print, and write with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {slots: [measure(slots, args.steps) for _ in range(3)] for slots in (1, 16, 64, 256)}
    for slots, times in rows.items():
        print(f"{slots:4d} slots  {statistics.median(times):7.1f} us a step  ({', '.join(f'{t:.1f}' for t in times)})")
    prefills = {f"{count} x {length}": measure_prefill(count, length) for count, length in PREFILLS}
    for name, (first, between, last) in prefills.items():
        print(f"{name:>10} tokens  {first:7.1f} us to the first step, {between:.1f} to a later, {last:.1f} at the end")
    if args.json:
        args.json.write_text(json.dumps({str(k): v for k, v in {**rows, **prefills}.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
