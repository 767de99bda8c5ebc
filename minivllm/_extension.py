"""The compiled kernels, loaded once, and in words what they can not do here.

A shared object that meets another torch than it was linked with fails with an undefined symbol, and a
kernel on a card that it has no code for with "no kernel image". Both are known before, from what setup.py
wrote down, and are said in one sentence instead.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

_PACKAGE = Path(__file__).resolve().parent


class BuildInfo(NamedTuple):
    """What the extension was compiled for."""

    torch: str  # the version of torch, "2.13.0+cpu"
    cuda: str  # the version of CUDA, "" for a build without
    archs: tuple[str, ...]  # compute capabilities as TORCH_CUDA_ARCH_LIST spells them, "9.0a", "8.0+PTX"


@cache
def build_info() -> BuildInfo:
    """Return what the extension was compiled for; ImportError where none was."""
    try:
        info = import_module("minivllm._build_info")
    except ImportError:
        raise ImportError(_not_compiled()) from None
    return BuildInfo(info.TORCH, info.CUDA, tuple(info.CUDA_ARCHS.split(";")) if info.CUDA_ARCHS else ())


def _in_source() -> bool:
    """Tell whether this package was imported from a checkout rather than from where pip installs."""
    return (_PACKAGE.parent / "setup.py").is_file()


def rebuild_command() -> str:
    """Return what compiles the kernels anew for the package that was imported.

    Beside its setup.py only an editable install does: any other puts them where this Python does not look.
    """
    return f"pip install --force-reinstall --no-deps {'-e ' if _in_source() else ''}."


def _not_compiled() -> str:
    """Say what to do about a package without kernels, which may hide one that has them."""
    text = "minivllm's kernels have not been compiled: run "
    if not _in_source():
        return f"{text}`{rebuild_command()}` where its source lies."
    # Python looks into the folder it was started in first, and finds the source there.
    text += f"`pip install -e .` in {_PACKAGE.parent}, whose source this Python has imported, or leave that folder "
    homes = [Path(entry).resolve() / "minivllm" for entry in sys.path]
    others = [home for home in homes if home != _PACKAGE and (home / "_build_info.py").is_file()]
    return text + (f"for the compiled one in {others[0]}." if others else "once `pip install .` has compiled another.")


@cache
def load() -> ModuleType:
    """Import the compiled kernels, ``minivllm._C``.

    Raises
    ------
    ImportError
        They were never compiled, or for another torch or another CUDA than the one installed.
    """
    info = build_info()
    built, found = _torch_name(info.torch, info.cuda), _torch_name(torch.__version__, torch.version.cuda)
    fault = (
        f"minivllm was compiled for {built} and {found} is installed: run `{rebuild_command()}` where its source lies "
        f"or `pip install torch=={info.torch.split('+')[0]}`."
    )
    if _release(info.torch) != _release(torch.__version__):
        raise ImportError(fault)
    if info.cuda and _release(info.cuda)[0] != _release(torch.version.cuda or "0")[0]:
        raise ImportError(fault)
    try:
        return import_module("minivllm._C")
    except ImportError as error:
        raise ImportError(f"{fault} ({error})") from error


@cache
def first_process() -> int:
    """Return the process that asked first, as an engine was about to compute; a fork of it inherits the answer."""
    return os.getpid()


def check_process() -> None:
    """Raise RuntimeError in a fork of a process that had an engine. One that was refused before it computed is none.

    Threads do not come along: OpenMP would wait for ever for those that the parent's kernels ran on. One that is told
    to use no others (``torch.set_num_threads(1)``) does not wait.
    """
    had_engine = first_process.cache_info().currsize > 0
    if had_engine and first_process() != os.getpid() and torch.get_num_threads() > 1:
        raise RuntimeError(
            f"process {first_process()} had an engine, and this one is a fork of it, without the threads that kernels "
            "run on: start it by 'spawn' (multiprocessing.get_context('spawn')) and make the engine there"
        )


def has_cuda() -> bool:
    """Tell whether the CUDA kernels were compiled in and torch sees a card."""
    return bool(build_info().cuda) and torch.cuda.is_available()


def check_cuda(device: torch.device) -> None:
    """Raise RuntimeError, in one sentence, where the kernels cannot run on a CUDA device."""
    info = build_info()
    if not info.cuda:
        raise RuntimeError(
            f"device {str(device)!r} was asked for and this minivllm was compiled for the CPU alone, with "
            f"torch {info.torch}: run `MINIVLLM_CUDA=1 {rebuild_command()}` where its source, nvcc and a "
            "torch with CUDA are."
        )
    if not torch.cuda.is_available():
        raise RuntimeError(f"device {str(device)!r} was asked for and torch {torch.__version__} sees no CUDA card.")
    capability = torch.cuda.get_device_capability(device)
    if not any(runs_on(arch, capability) for arch in info.archs):
        card = "{}.{}".format(*capability)
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {card} and this minivllm was "
            f"compiled for {', '.join(info.archs)}: run `TORCH_CUDA_ARCH_LIST={card} {rebuild_command()}` where its "
            "source lies."
        )


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Tell whether code compiled for ``arch`` ("8.0", "9.0a", "8.0+PTX") runs on a card."""
    number, _, ptx = arch.partition("+")
    major, minor = (int(part) for part in number.rstrip("af").split("."))
    if number.endswith("a"):  # architecture-specific: that card alone, as PTX too
        return (major, minor) == capability
    # Machine code runs on later cards of its generation, PTX on every later card.
    same_generation = capability[0] == major and capability[1] >= minor
    return same_generation or (ptx == "PTX" and capability >= (major, minor))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _torch_name(version: str, cuda: str | None) -> str:
    return f"torch {version} ({f'CUDA {cuda}' if cuda else 'no CUDA'})"
