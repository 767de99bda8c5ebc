"""Run kernels' tests under compute-sanitizer and write down what it found: tests/gpu_sanitizers.json.

``python tests/gpu_sanitize.py``, on a machine with a card, after ``make gpu-report``, which builds the extension. Each
tool goes over each part, some at a time; only this project's kernels are looked at. A part that takes too long is not
finished, and so not clean. The file is written as parts end, and a run goes on from where the last one of the same code
was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from gpu_report import ROOT, RUNNING, code_hash, number_of_jobs, stamp, stopping, write_json

RESULTS = ROOT / "tests" / "gpu_sanitizers.json"
TOOLS = ("memcheck", "racecheck", "synccheck")
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu"]
SETTLED = "1-64-embed_and or 3-13-embedding or 20-16-embed_and or 70-64-embedding"
# What a part runs. Every kernel is in one of them, few sizes of each: a tool makes kernels a hundred times slower.
PARTS = {
    "attention": ["tests/gpu/attention_check.py", "--quick", "16", "--library", "{attention}"],
    "attention in float32": ["tests/gpu/attention_check.py", "--quick", "32", "--library", "{attention}"],
    "attention of 200 rows before its queries": [*PYTEST, "tests/gpu/test_settled.py", "-k", "200-64-embed_and"],
    "attention before its queries": [*PYTEST, "tests/gpu/test_settled.py", "-k", SETTLED],
    "products of few tokens": ["tests/gpu/gemm_check.py", "--quick", "few"],
    "products of many tokens": ["tests/gpu/gemm_check.py", "--quick", "many"],
    "products in float32": [*PYTEST, "tests/test_ops.py", "-k", "test_linear and not float16 and 576"],
    "products in float32, other sizes": [*PYTEST, "tests/test_ops.py", "-k", "test_linear and not float16 and not 576"],
    "products of 16 bits for every card": [*PYTEST, "tests/test_ops.py", "-k", "test_linear and float16"],
    "products with parts of a layer": [*PYTEST, "tests/gpu/test_fused.py", "-k", "bias or outside or without_a_slot"],
    "rows that are weighed": [*PYTEST, "tests/gpu/test_fused.py", "-k", "wide_tiles or embed_and_weigh and 576"],
    "norms and rope": [*PYTEST, "tests/test_ops.py", "-k", "norm or rope or embedding or silu"],
    "sums of chunks": [*PYTEST, "tests/gpu/test_partial_sums.py", "-k", "adds or added"],
    "leaders and copies": [
        *PYTEST,
        "tests/gpu/test_leaders.py",
        "tests/gpu/test_copy_words.py",
        "-k",
        "520-576 or equal or words or refusals",
    ],
    "leaders of all instances": [*PYTEST, "tests/gpu/test_leaders.py", "-k", "32008-128"],
    "gate_up of all instances": [*PYTEST, "tests/gpu/test_fused.py", "-k", "gate_up and 128-8192"],
    "draws": [*PYTEST, "tests/test_sampling.py", "-k", "draw_is_the_argmax or ties or padding or counts"],
    "draws that count on": [*PYTEST, "tests/gpu/test_counters.py", "-k", "count_on and not 1100 and not 128256"],
    "log probabilities and state": [*PYTEST, "tests/test_logprobs.py"],
}
running: set[int] = set()  # processes, each the leader of its group
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")


def build_library(folder: str) -> str:
    """Compile what the parts load beside the extension; return the attention kernels' library."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    import attention_kernels
    import gemm_check

    with ThreadPoolExecutor() as pool:
        gemm, attention = pool.submit(gemm_check.build), pool.submit(attention_kernels.build, Path(folder))
        gemm.result()
        return str(attention.result())


def run(tool: str, part: str, library: str, seconds: int) -> str:
    """Run one part under one tool; return "clean" or what came out instead."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=minivllm", "--error-exitcode", "9"]
    command += [sys.executable, *(argument.format(attention=library) for argument in PARTS[part])]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, RUNNING: "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    running.add(process.pid)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # The tool's child has the card and the pipe, and would go on.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"not finished in {seconds} s"
    finally:
        running.discard(process.pid)
    found = SUMMARY.findall(output)
    if process.returncode == 0 and found and all(int(a or b) == 0 for a, b in found):
        return "clean"
    # The same thing is told once for each thread, with the host's whole stack.
    told = {line for line in output.splitlines() if line.startswith("=====") and "Host Frame" not in line}
    shown = "\n".join(sorted(told)[:60])
    print(f"---- {tool}: {part}: status {process.returncode}\n{shown}\n{output[-2000:]}", flush=True)
    return f"status {process.returncode}, {' '.join(a or b for a, b in found) or 'no summary of'} errors"


def earlier(head: dict[str, str]) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], float]]:
    """Return what the last run's file says of this code here, and the seconds that its parts took, of whatever code."""
    try:
        known = json.loads(RESULTS.read_text())
        seconds = {(t, p): float(s) for t, parts in known.get("seconds", {}).items() for p, s in parts.items()}
        results = {(t, p): str(what) for t, parts in known["results"].items() for p, what in parts.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}, {}
    same = all(known.get(key) == value for key, value in head.items() if key != "date")
    return results if same else {}, seconds


def by_tool(values: dict[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    return {tool: {part: values[tool, part] for part in PARTS if (tool, part) in values} for tool in TOOLS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--jobs", type=number_of_jobs, default=min(15, os.cpu_count() or 1), help="parts that run at the same time"
    )
    parser.add_argument("--seconds", type=int, default=600, help="a part may take (default: 600)")
    parser.add_argument("--again", action="store_true", help="also the parts that were clean of this very code")
    args = parser.parse_args()
    for tool in ("nvcc", "compute-sanitizer"):
        if shutil.which(tool) is None:
            parser.error(f"there is no {tool}")
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA card")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    head = stamp(hashlib.sha256(f"{code_hash()} {PARTS}".encode()).hexdigest())
    before, took = ({}, earlier(head)[1]) if args.again else earlier(head)
    results = {(tool, part): before.get((tool, part), "not run") for tool in TOOLS for part in PARTS}
    # The slowest first; racecheck is, of what is not known.
    left = sorted(
        (key for key in results if results[key] != "clean"),
        key=lambda key: (-took.get(key, math.inf), key[0] != "racecheck"),
    )

    def timed(key: tuple[str, str], library: str) -> tuple[str, float]:
        begun = time.monotonic()
        return run(*key, library, args.seconds), time.monotonic() - begun

    try:
        with tempfile.TemporaryDirectory() as folder, stopping(ThreadPoolExecutor(args.jobs)) as pool:
            library = build_library(folder) if left else ""
            jobs = {pool.submit(timed, key, library): key for key in left}
            for job in as_completed(jobs):
                key = jobs[job]
                results[key], took[key] = job.result()
                took[key] = round(took[key], 1)
                print(f"{': '.join(key)}: {results[key]}, {took[key]} s", flush=True)
                write_json(RESULTS, {**head, "results": by_tool(results), "seconds": by_tool(took)})
    finally:
        for pid in list(running):
            with suppress(ProcessLookupError):  # it ended just now
                os.killpg(pid, signal.SIGKILL)
    unclean = [f"{': '.join(key)}: {what}" for key, what in results.items() if what != "clean"]
    print("\n".join(unclean) or "clean", flush=True)
    return bool(unclean)


if __name__ == "__main__":
    sys.exit(main())
