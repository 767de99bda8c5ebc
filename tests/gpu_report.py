"""Run the GPU tests and write down what came out, for the machines that have no card.

``python tests/gpu_report.py`` runs them, each file in a process of its own, and writes tests/gpu_report.json, which
names the files that had not ended yet if it is stopped; with ``--check`` it says whether that file is about the code
as it is now.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "gpu_report.json"
RUNNING = "MINIVLLM_GPU_REPORT"  # set in the environment while the report is being made
# `device` itself, or `make`, whose engines are on it.
GPU_TEST = re.compile(r"^def test_\w+\([^)]*\b(device|make)\b|\bmark\.gpu\b", re.MULTILINE)
CODE = {".h", ".cpp", ".cu", ".cuh", ".inc"}


def covered_files() -> list[Path]:
    """Return what the report is about: csrc/, the tests that run on a card, and the references they use."""
    tests = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if path.parent.name == "gpu"
        or path.name == "reference.py"
        or (path.name.startswith("test_") and GPU_TEST.search(path.read_text()))
    ]
    return sorted([*(p for p in (ROOT / "csrc").rglob("*") if p.suffix in CODE), *tests])


def code_hash() -> str:
    """Return a SHA-256 over the names and contents of the covered files."""
    digest = hashlib.sha256()
    for path in covered_files():
        name, content = path.relative_to(ROOT).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(content)))
        digest.update(content)
    return digest.hexdigest()


def stamp(code: str) -> dict[str, str]:
    """Return what a report says of the card, the day and the code, a `code_hash` from before its tests ran."""
    return {
        "card": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "hash": code,
    }


def write_json(file: Path, value: object) -> None:
    """Write a file whole or not at all."""
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(value, indent=2) + "\n")
    beside.replace(file)


def describe() -> str:
    """Say in a line what the last report holds and whether it is about this code."""
    if not REPORT.exists():
        return "There is no tests/gpu_report.json: `make gpu-report` on a machine with a card writes it."
    try:
        report = json.loads(REPORT.read_text())
        counts = ", ".join(f"{n} {outcome}" for outcome, n in report["counts"].items())
        if left := report.get("not_run"):
            counts += f", {len(left)} files not run"
        seen, code = f"{report['card']}, {report['date']}, torch {report['torch']}: {counts}", report["hash"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return "tests/gpu_report.json is damaged: `make gpu-report` on a machine with a card writes it anew."
    if code == code_hash():
        return f"tests/gpu_report.json is of this code ({seen})."
    return f"tests/gpu_report.json is NOT of this code: csrc/ or the GPU tests changed since ({seen})."


class Tally:
    """A pytest plugin that counts outcomes."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that fails in its setup or teardown failed; one that was skipped was skipped in its setup.
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1


def run_tests(files: list[str], counts: Path) -> int:
    """Run the GPU tests of some files here, write their counts; return the exit status."""
    # Warnings are errors with the pinned versions of pyproject.toml; the card's machine has its own.
    tally = Tally()
    status = int(pytest.main(["-m", "gpu", "-W", "default", *files], plugins=[tally]))
    counts.write_text(json.dumps(tally.counts))
    return status


def run_apart(file: Path, folder: str) -> tuple[int, dict[str, int]]:
    """Run one file's GPU tests in a process of its own and show what it printed; return its status and counts."""
    counts = Path(folder, file.stem + ".json")
    done = subprocess.run(
        [sys.executable, __file__, "--run", str(file), "--counts", str(counts)],
        env={**os.environ, RUNNING: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout, flush=True)
    return done.returncode, json.loads(counts.read_text()) if counts.exists() else {"failed": 1}


@contextmanager
def stopping(pool: ThreadPoolExecutor) -> Iterator[ThreadPoolExecutor]:
    """Give a pool that begins nothing more once an exception leaves the block, an interrupt above all."""
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def number_of_jobs(text: str) -> int:
    """Read a number of at least 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def make_report(jobs: int) -> int:
    """Run the tests marked gpu, some files at a time, and write the report as they end; return the exit status."""
    before, total = code_hash(), Tally().counts
    try:
        took = json.loads(REPORT.read_text())["seconds"]
    except (OSError, ValueError, LookupError, TypeError):
        took = {}
    # Only the files that hold GPU tests are read: the rest may need packages that are not there. The slowest first.
    files = [path for path in covered_files() if path.name.startswith("test_")]
    files.sort(key=lambda file: -took.get(file.name, math.inf))
    seconds: dict[str, float] = {}
    status = 0

    def run(file: Path) -> tuple[Path, float, int, dict[str, int]]:
        begun = time.monotonic()
        code, counts = run_apart(file, folder)
        return file, time.monotonic() - begun, code, counts

    with tempfile.TemporaryDirectory() as folder, stopping(ThreadPoolExecutor(jobs)) as pool:
        for done in as_completed([pool.submit(run, file) for file in files]):
            file, spent, code, counts = done.result()
            seconds[file.name] = round(spent, 1)
            for outcome, n in counts.items():
                total[outcome] += n
            if code != pytest.ExitCode.NO_TESTS_COLLECTED:
                status = max(status, abs(code))  # a process that a signal ended has a negative one
            left = [path.name for path in files if path.name not in seconds]
            if total["passed"]:
                report = {**stamp(before), "counts": total, "not_run": left, "seconds": seconds}
                write_json(REPORT, report)
    if not total["passed"]:
        print("No GPU test passed, so no report was written.", file=sys.stderr)
        return status or 1
    print(describe())
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the report is of this code")
    parser.add_argument(
        "--jobs", type=number_of_jobs, default=min(8, os.cpu_count() or 1), help="test files that run at the same time"
    )
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check:
        print(describe())
        return 0
    if args.run:
        return run_tests(args.run, args.counts)
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA card")
    return make_report(args.jobs)


if __name__ == "__main__":
    sys.exit(main())
