"""Workloads that measure an engine, and the least time that their bytes and operations take.

Prompts are random token ids from a fixed seed, the end token is ignored, tokens are the likeliest ones, and the time is
that of one call to ``generate`` for all requests together, after a warm-up run. ``tok_s`` counts new tokens, or prompt
tokens where a request asks for one new token alone.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minivllm.config import ModelConfig, resolve_dtype
from minivllm.request import SamplingParams

if TYPE_CHECKING:
    from minivllm.engine import BatchEngine

NUM_SLOTS = 256
_READ_BYTES, _READS = 256 << 20, 9  # of the CPU's memory, to see how fast it is
SEED = 20


@dataclass(frozen=True)
class Request:
    """Be one request: its prompt, and how many tokens to generate."""

    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Machine:
    """Hold what a device does at most: bytes read a second, multiply-adds (as two operations) a second."""

    name: str
    bytes_per_s: float
    flops: float


H200 = Machine("NVIDIA H200", 4.6e12, 800e12)  # measured


@dataclass(frozen=True)
class Workload:
    """Be a named set of requests; lengths are drawn uniformly from the ranges, both ends included."""

    name: str
    count: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    device: str = "cuda"

    @property
    def is_prefill(self) -> bool:
        """Whether it is about prompts alone."""
        return self.new_tokens == (1, 1)

    def requests(self, vocab_size: int) -> list[Request]:
        """Draw the requests; the same ones each time."""
        draw = random.Random(f"{SEED} {self.name}")
        lengths = [(draw.randint(*self.prompt_tokens), draw.randint(*self.new_tokens)) for _ in range(self.count)]
        return [Request([draw.randrange(vocab_size) for _ in range(n)], new) for n, new in lengths]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("latency_b1", 1, (128, 128), (512, 512)),
        Workload("decode_b8", 8, (128, 128), (512, 512)),
        Workload("decode_b32", 32, (128, 128), (512, 512)),
        Workload("decode_b128", 128, (128, 128), (512, 512)),
        Workload("decode_b256", 256, (128, 128), (512, 512)),
        Workload("mixed_256", 256, (100, 1024), (100, 1024)),
        Workload("prefill_8k", 1, (8192, 8192), (1, 1)),
        Workload("prefill_32x1k", 32, (1024, 1024), (1, 1)),
        Workload("cpu_b1", 1, (16, 16), (128, 128), "cpu"),
        Workload("cpu_b8", 8, (16, 16), (128, 128), "cpu"),
    )
}
_HOME = Path(__file__).parents[1]  # where this package was imported from
START = "start"  # the time to an engine that is ready; it has no requests


@dataclass(frozen=True)
class Costs:
    """Hold what a model's tokens cost on a machine."""

    config: ModelConfig
    dtype: torch.dtype
    machine: Machine

    @property
    def _layers(self) -> int:
        """Weights of the layers, the embedding and the head left out."""
        c = self.config
        return c.num_parameters - c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)

    def decode_step(self, contexts: Sequence[int]) -> float:
        """Return the least seconds of a step for rows of these contexts: weights read once, each row's KV once."""
        c = self.config
        weights = self._layers + c.vocab_size * c.hidden_size  # the embedding is only looked up
        read = weights * self.dtype.itemsize / self.machine.bytes_per_s
        computed = 2 * weights * len(contexts) / self.machine.flops
        kv = sum(contexts) * c.kv_bytes_per_token(self.dtype) / self.machine.bytes_per_s
        return max(read, computed) + kv

    def prefill(self, tokens: int) -> float:
        """Return the least seconds for a prompt: products, and causal attention (half of the square)."""
        c = self.config
        attention = 2 * tokens**2 * c.num_q_heads * c.head_dim * c.num_layers
        return (2 * self._layers * tokens + attention) / self.machine.flops

    def floor(self, requests: Sequence[Request]) -> float:
        """Return the least seconds for requests that all start at once."""
        total = sum(self.prefill(len(r.prompt)) for r in requests)  # which gives each its first token
        for step in range(1, max(r.new_tokens for r in requests)):
            total += self.decode_step([len(r.prompt) + step for r in requests if r.new_tokens > step])
        return total


def on_gpu(device: str) -> bool:
    """Tell whether a device ("cpu", "cuda", "cuda:1") is a card."""
    return torch.device(device).type == "cuda"


def card_name(device: str) -> str:
    """Return the name of the device that is measured."""
    return torch.cuda.get_device_name(device) if on_gpu(device) else f"CPU, {os.cpu_count()} cores"


def machine_of(device: str) -> Machine | None:
    """Return what is known of the machine that is measured; None for another one, which then has no floor."""
    if on_gpu(device):
        return H200 if "H200" in card_name(device) else None
    return _cpu()


@lru_cache(1)
def _cpu() -> Machine:
    """Measure what the CPU reads a second; its multiply-adds are left out: its workloads are bound by their weights."""
    numbers, seconds = torch.ones(_READ_BYTES // 4), []
    for _ in range(_READS):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return Machine("CPU", _READ_BYTES / min(seconds), float("inf"))


def commit_name(home: Path = _HOME) -> str:
    """Return the commit of the checkout that is at ``home``; another's, inside of which it lies, is not asked for."""
    if not (home / ".git").exists():
        return "unknown"
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        out = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return out.stdout.strip()


def choose(names: Iterable[str] | None, device: str) -> list[str]:
    """Return the workloads to run, in order; ValueError names an unknown one."""
    known = [*WORKLOADS, START]
    if names is None:
        return [n for n in known if n == START or WORKLOADS[n].device == torch.device(device).type]
    chosen = list(names)
    for name in chosen:
        if name not in known:
            raise ValueError(f"there is no workload {name!r}; there are {', '.join(known)}")
    return chosen


def measure(run: Callable[[list[Request]], object], requests: list[Request], runs: int) -> list[float]:
    """Return the seconds of each run, after one that does not count."""
    run(requests)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        run(requests)
        seconds.append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float], workload: Workload, requests: list[Request], floor: float | None) -> dict[str, Any]:
    """Return a workload's figures."""
    median = statistics.median(seconds)
    tokens = sum(len(r.prompt) if workload.is_prefill else r.new_tokens for r in requests)
    return {
        "s": round(median, 5),
        "runs": [round(s, 5) for s in seconds],
        "tok_s": round(tokens / median, 1),
        "floor_share": None if floor is None else round(floor / median, 3),
    }


def minivllm_runner(engine: BatchEngine) -> Callable[[list[Request]], object]:
    """Return what runs requests on this engine; every token that was asked for must come."""

    def run(requests: list[Request]) -> None:
        params = [SamplingParams(max_tokens=r.new_tokens, ignore_eos=True) for r in requests]
        answers = engine.generate([r.prompt for r in requests], params)
        for answer, request in zip(answers, requests, strict=True):
            if len(answer.token_ids) != request.new_tokens:
                raise RuntimeError(f"{len(answer.token_ids)} tokens came, {request.new_tokens} were asked for")

    return run


_START = """
import sys, time
sys.path.insert(0, sys.argv[5])  # not what else lies in the current folder
begin = time.perf_counter()
from minivllm import BatchEngine
BatchEngine  # imports torch
imported = time.perf_counter()
engine = BatchEngine(sys.argv[1], device=sys.argv[2], num_slots=int(sys.argv[3]), prefix_caching=False,
                     exact=sys.argv[4] == "True")
ready = time.perf_counter()
print(imported - begin, ready - imported)
"""


def measure_start(model: str, device: str, num_slots: int, runs: int, *, exact: bool = True) -> dict[str, Any]:
    """Time fresh processes: the import, then an engine that is ready for its first prompt."""
    found = []
    for _ in range(runs):
        command = [sys.executable, "-c", _START, model, device, str(num_slots), str(exact), str(_HOME)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            told = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise RuntimeError(f"the engine did not start: {told[-1]}")
        imported, ready = (float(x) for x in done.stdout.split())
        found.append((imported + ready, imported, ready))
    total, imported, ready = (round(statistics.median(times), 3) for times in zip(*found, strict=True))
    return {"s": total, "runs": [round(f[0], 3) for f in found], "import_s": imported, "engine_s": ready}


def header(engine: str, model: str, device: str, commit: str | None) -> dict[str, Any]:
    """Return what a file of figures begins with."""
    return {
        "card": card_name(device),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit or commit_name(),
        "torch": torch.__version__,
        "engine": engine,
        "model": Path(model).name if Path(model).exists() else model,
        "workloads": {},
    }


def engine_name(exact: bool) -> str:
    """Return what a file of figures calls this engine."""
    return "minivllm" if exact else "minivllm, not exact"


def run_minivllm(
    path: str,
    names: Sequence[str],
    runs: int,
    device: str,
    told: Callable[[str, dict[str, Any]], None],
    *,
    exact: bool = True,
) -> dict[str, dict[str, Any]]:
    """Run workloads on this engine; ``told`` hears of each as it ends."""
    from minivllm.engine import BatchEngine

    figures: dict[str, dict[str, Any]] = {}
    slots = NUM_SLOTS if on_gpu(device) else 8
    if START in names:
        figures[START] = measure_start(path, device, slots, runs, exact=exact)
        told(START, figures[START])
    chosen = [name for name in names if name != START]
    if not chosen:
        return figures
    # Equal prompts in every run: what an earlier one left in the cache must not help.
    with BatchEngine(path, device=device, num_slots=slots, prefix_caching=False, exact=exact) as engine:
        machine = machine_of(device)
        costs = None if machine is None else Costs(engine.config, engine.dtype, machine)
        for name in chosen:
            workload = WORKLOADS[name]
            requests = workload.requests(engine.config.vocab_size)
            seconds = measure(minivllm_runner(engine), requests, runs)
            figures[name] = summary(seconds, workload, requests, None if costs is None else costs.floor(requests))
            told(name, figures[name])
        engine.check_integrity()
    return figures


def floor_of(path: str, name: str, device: str) -> float | None:
    """Return a workload's least seconds for the model at ``path``, where the machine is known."""
    machine = machine_of(device)
    if machine is None:
        return None
    config = ModelConfig.from_dir(path)
    costs = Costs(config, resolve_dtype(config, "auto", torch.device(device)), machine)
    return costs.floor(WORKLOADS[name].requests(config.vocab_size))


def line(name: str, figure: dict[str, Any]) -> str:
    """Return a row of the table."""
    spread = f"{min(figure['runs']):.4g} … {max(figure['runs']):.4g}"
    if name == START:
        return f"{name:<14} {figure['s']:>9.3f} s  import {figure['import_s']} s, engine {figure['engine_s']} s"
    share = "" if figure["floor_share"] is None else f"{100 * figure['floor_share']:>6.0f} %"
    return f"{name:<14} {figure['s']:>9.4f} s  {figure['tok_s']:>11,.1f} tok/s  {share:>8}  ({spread})"


TABLE_HEAD = f"{'workload':<14} {'median':>11}  {'throughput':>17}  {'of floor':>8}  (runs)"
