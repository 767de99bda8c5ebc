"""``minivllm bench``: this engine's figures."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.commands.options import check_device
from minivllm.whole_file import written_whole


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write down."""
    output = None if args.output is None else Path(args.output)
    check_runs(args.runs)
    if output is not None:
        check_output(output)
    from minivllm import bench
    from minivllm.config import ModelConfig
    from minivllm.loader import resolve_model
    from minivllm.random_model import model_path

    device = check_device(args.device)
    names = bench.choose(args.workloads, device)
    path = str(resolve_model(model_path(args.model)))
    ModelConfig.from_dir(path)  # what is no model is refused here, not by the process whose start is measured
    if not args.json:
        print(bench.TABLE_HEAD, flush=True)

    result = bench.header(bench.engine_name(args.exact), args.model, device, args.commit)

    told = recorder(result, output, shown=not args.json)
    bench.run_minivllm(path, names, args.runs, device, told, exact=args.exact)
    if args.json:
        print(json.dumps(result, indent=2))
    return 0


def recorder(
    result: dict[str, Any], output: Path | None, *, shown: bool = True
) -> Callable[[str, dict[str, Any]], None]:
    """Return what takes each workload's figures as they come: into the result, onto the screen, into the file."""
    from minivllm import bench

    def told(name: str, figure: dict[str, Any]) -> None:
        result["workloads"][name] = figure
        if shown:
            print(bench.line(name, figure), flush=True)
        if output is not None:
            write(output, result)

    return told


def check_runs(runs: int) -> None:
    """Refuse fewer runs than one."""
    if runs < 1:
        raise ValueError(f"--runs must be at least 1, not {runs}")


def check_output(file: Path) -> None:
    """Refuse what could not be written to before minutes are spent; make the directory that it is to lie in."""
    if file.is_dir():
        raise ValueError(f"--output {file} is a directory, and a file is wanted")
    _read(file)
    if file.exists() and not file.is_file():
        raise ValueError(f"--output {file} is no file")
    file.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=file.parent).close()


def _read(file: Path) -> dict[str, Any]:
    """Return the figures in a file, {"workloads": {}} without one; ValueError where it holds something else."""
    try:
        old = json.loads(file.read_bytes()) if file.is_file() else {"workloads": {}}
    except ValueError:
        old = None
    if not isinstance(old, dict) or not isinstance(old.get("workloads"), dict):
        raise ValueError(f"--output {file} holds something else than figures of this command: it is left as it is")
    return old


def write(file: Path, result: dict[str, Any]) -> None:
    """Write figures; those of other workloads stay where the file's are of the same card, commit, torch and model."""
    old = _read(file)
    if all(old.get(key) == result[key] for key in ("card", "commit", "torch", "engine", "model")):
        result = {**result, "workloads": {**old["workloads"], **result["workloads"]}}
    with written_whole(file) as partial:
        partial.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
