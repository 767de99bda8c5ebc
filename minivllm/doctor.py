"""What is wrong with an installation, and what to type."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import torch

from minivllm import __version__, _extension
from minivllm.commands.options import format_bytes


class Check(NamedTuple):
    """Be one thing looked at; ``advice`` says what to do where it is not well."""

    name: str
    state: Literal["well", "note", "wrong"]
    found: str
    advice: str = ""


_EXTRAS = {
    "server": ("fastapi", "uvicorn", "prometheus-client"),
    "plot": ("matplotlib",),
    "gguf": ("gguf",),
}


def examine() -> list[Check]:
    """Look at everything, without raising."""
    return [*_versions(), *_build(), *_cards(), *_extras()]


def _versions() -> list[Check]:
    python = platform.python_version()
    checks = [
        Check("minivllm", "well", f"{__version__} in {os.path.dirname(__file__)}"),
        Check("python", "well", f"{python} at {sys.executable}"),
        Check("machine", "well", f"{platform.platform()}, {os.cpu_count()} cores"),
    ]
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    old = release < (2, 10)
    torch_check = Check("torch", "well", f"{torch.__version__} ({cuda})")
    if old:
        torch_check = torch_check._replace(state="wrong", advice="pip install 'torch>=2.10'")
    return [*checks, torch_check]


def _build() -> list[Check]:
    """Tell what the extension was compiled for, and whether its kernels answer."""
    try:
        info = _extension.build_info()
    except ImportError as error:
        return [Check("extension", "wrong", "was never compiled", str(error))]
    kind = f"CUDA {info.cuda} for {', '.join(info.archs)}" if info.cuda else "the CPU alone"
    built = Check("extension", "well", f"compiled with torch {info.torch} for {kind}")
    try:
        _extension.load()
        good = _kernels_answer(torch.device("cpu"))
    except Exception as error:  # whatever it is, it is what the doctor was asked about
        advice = str(error) if isinstance(error, ImportError) else f"{error}; {_again()}"
        return [built._replace(state="wrong", advice=advice)]
    if good:
        return [built, Check("kernels", "well", "the CPU's answer")]
    return [built, Check("kernels", "wrong", "the CPU's give wrong numbers", _again())]


def _again() -> str:
    return f"build again: {_extension.rebuild_command()}"


def _kernels_answer(device: torch.device) -> bool:
    """Run one kernel and compare: a row of threes has a root mean square of three."""
    from minivllm import ops

    found = ops.rms_norm(torch.full((1, 8), 3.0, device=device), torch.ones(8, device=device), 0.0)
    return bool(torch.allclose(found.cpu(), torch.ones(1, 8)))


def _cards() -> list[Check]:
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            return [Check("card", "note", "none; the CPU is used")]
        advice = "install a torch that was built for CUDA, or see to the driver (nvidia-smi)"
        return [Check("card", "wrong", "there is a driver, and torch sees no card", advice)]
    checks = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        text = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        try:
            free, total = torch.cuda.mem_get_info(device)
            text += f", {format_bytes(free)} of {format_bytes(total)} free"
            _extension.check_cuda(device)
            if _kernels_answer(device):
                checks.append(Check(f"card {index}", "well", text + "; its kernels answer"))
            else:
                checks.append(Check(f"card {index}", "wrong", text + "; its kernels give wrong numbers", _again()))
        except (RuntimeError, ImportError) as error:
            checks.append(Check(f"card {index}", "wrong", text, str(error)))
    return checks


def _extras() -> list[Check]:
    checks = []
    for extra, packages in _EXTRAS.items():
        found = {package: _version_of(package) for package in packages}
        missing = [package for package, number in found.items() if number is None]
        if missing:
            text = f"{', '.join(missing)} not installed"
            checks.append(Check(extra, "note", text, f"pip install 'minivllm[{extra}]', if you want it"))
        else:
            checks.append(Check(extra, "well", ", ".join(f"{package} {number}" for package, number in found.items())))
    return checks


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(checks: list[Check]) -> str:
    """Return a line a check, and a verdict."""
    signs = {"well": "ok", "note": "--", "wrong": "!!"}
    lines = []
    for check in checks:
        lines.append(f"{signs[check.state]}  {check.name:<10} {check.found}")
        if check.advice:
            lines.append(f"    {'':<10} {check.advice}")
    wrong = sum(check.state == "wrong" for check in checks)
    lines += ["", "All is well." if wrong == 0 else f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong."]
    return "\n".join(lines)
