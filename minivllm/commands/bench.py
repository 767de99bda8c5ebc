"""``minivllm bench``: this engine's figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from minivllm.commands.options import check_device


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write down."""
    if args.runs < 1:
        raise ValueError(f"--runs must be at least 1, not {args.runs}")
    if args.output is not None:
        check_output(Path(args.output))
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

    def told(name: str, figure: dict[str, Any]) -> None:
        result["workloads"][name] = figure
        if not args.json:
            print(bench.line(name, figure), flush=True)
        if args.output is not None:
            write(Path(args.output), result)

    bench.run_minivllm(path, names, args.runs, device, told, exact=args.exact)
    if args.json:
        print(json.dumps(result, indent=2))
    return 0


def check_output(file: Path) -> None:
    """Refuse what could not be written to before minutes are spent; make the directory that it is to lie in."""
    if file.is_dir():
        raise ValueError(f"--output {file} is a directory, and a file is wanted")
    _read(file)
    if file.exists() and not file.is_file():
        raise ValueError(f"--output {file} is no file")
    file.parent.mkdir(parents=True, exist_ok=True)
    _beside(file).write_bytes(b"")
    _beside(file).unlink()


def _beside(file: Path) -> Path:
    return file.with_name(f"{file.name}.part")


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
    _beside(file).write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _beside(file).replace(file)  # whole or not at all
