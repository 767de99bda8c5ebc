"""Run the GPU tests and write down what came out, for the machines that have no card.

``python tests/gpu_report.py`` runs them and writes tests/gpu_report.json; with ``--check`` it says whether
that file is about the code as it is now.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "gpu_report.json"
RUNNING = "MINIVLLM_GPU_REPORT"  # set in the environment while the report is being made
GPU_TEST = re.compile(r"^def test_\w+\([^)]*\bdevice\b|\bmark\.gpu\b", re.MULTILINE)
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


def describe() -> str:
    """Say in a line what the last report holds and whether it is about this code."""
    if not REPORT.exists():
        return "There is no tests/gpu_report.json: `make gpu-report` on a machine with a card writes it."
    report = json.loads(REPORT.read_text())
    counts = ", ".join(f"{n} {outcome}" for outcome, n in report["counts"].items())
    seen = f"{report['card']}, {report['date']}, torch {report['torch']}: {counts}"
    if report["hash"] == code_hash():
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


def make_report() -> int:
    """Run the tests marked gpu and write the report; return the exit status."""
    os.environ[RUNNING] = "1"
    before, tally = code_hash(), Tally()
    # Warnings are errors with the pinned versions of pyproject.toml; the card's machine has its own.
    # Only the files that hold GPU tests are read: the rest may need packages that are not there.
    files = [str(path) for path in covered_files() if path.name.startswith("test_")]
    options = ["-m", "gpu", "-W", "default", *files]
    status = int(pytest.main(options, plugins=[tally]))
    if not tally.counts["passed"]:
        print("No GPU test passed, so no report was written.", file=sys.stderr)
        return status or 1
    report = {
        "card": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "counts": tally.counts,
        "hash": before,
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(describe())
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the report is of this code")
    if parser.parse_args().check:
        print(describe())
        return 0
    return make_report()


if __name__ == "__main__":
    sys.exit(main())
