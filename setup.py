"""Build minivllm._C against the torch of the environment that asks for it.

``MINIVLLM_CUDA=0`` or ``1`` leaves the CUDA kernels out or insists on them; without it they are
built where torch has CUDA and there is an nvcc. ``TORCH_CUDA_ARCH_LIST`` names the architectures.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

MIN_TORCH = (2, 10)
ANY_CARD = "8.0+PTX;9.0a"  # machine code for Ampere, Ada and Hopper; newer cards compile the PTX
ROOT = Path(__file__).resolve().parent


def import_torch():
    """Import torch, from the target environment where pip hides it.

    pip's build isolation runs the target's own interpreter and only takes site-packages off
    sys.path, so the interpreter still knows where they are.
    """
    try:
        import torch
    except ImportError:
        homes = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
        if site.ENABLE_USER_SITE:
            homes.append(site.getusersitepackages())
        # At the end: the build's own setuptools and ninja stay in front.
        sys.path += [home for home in dict.fromkeys(homes) if Path(home, "torch").is_dir()]
        try:
            import torch
        except ImportError as error:
            raise SystemExit(
                "minivllm is compiled against the torch it will run with and there is none in "
                f"{sys.prefix} ({error}): `pip install 'torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}'` first, then "
                "`pip install .` again (`--no-build-isolation` where the installer is not pip)."
            ) from None
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < MIN_TORCH:
        raise SystemExit(
            f"minivllm needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, and torch {torch.__version__} "
            f"is installed in {sys.prefix}."
        )
    return torch


def ask(command: list[str]) -> str:
    """Return what a command prints, on either stream, or '' where it cannot be run."""
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_cuda_home() -> str | None:
    """Return the toolkit's directory: CUDA_HOME, or what the nvcc on the PATH calls its own.

    The nvcc on the PATH may be a link or a wrapper script, whose parent is not the toolkit.
    """
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    if not given and nvcc:
        top = re.search(r"^#\$ TOP=(.*)$", ask([nvcc, "-dryrun", "-x", "cu", os.devnull]), re.MULTILINE)
        given = os.path.realpath(top.group(1).strip()) if top else str(Path(nvcc).resolve().parents[1])
    given = given or "/usr/local/cuda"
    return given if Path(given, "bin", "nvcc").exists() else None


def use_cuda(torch, cuda_home: str | None) -> bool:
    """Decide whether the CUDA kernels are built in, and refuse what cannot work."""
    forced = os.environ.get("MINIVLLM_CUDA", "")
    if forced not in ("", "0", "1"):
        raise SystemExit(f"MINIVLLM_CUDA is {forced!r}; it can be 0 (CPU only) or 1 (CUDA kernels).")
    if forced == "0":
        return False
    lacking = None
    if torch.version.cuda is None:
        lacking = f"torch {torch.__version__} was built without CUDA"
    elif cuda_home is None:
        lacking = "there is no nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda"
    else:
        release = re.search(r"release (\d+)\.(\d+)", ask([f"{cuda_home}/bin/nvcc", "--version"]))
        if release and release.group(1) != torch.version.cuda.split(".")[0]:
            raise SystemExit(
                f"torch {torch.__version__} was built with CUDA {torch.version.cuda} and the nvcc in "
                f"{cuda_home} is {'.'.join(release.groups())}: set CUDA_HOME to a CUDA "
                f"{torch.version.cuda.split('.')[0]} toolkit, or MINIVLLM_CUDA=0 to build for the CPU alone."
            )
    if lacking and forced == "1":
        raise SystemExit(f"MINIVLLM_CUDA=1 asks for the CUDA kernels, but {lacking}.")
    return lacking is None


def cuda_archs(torch, cuda_home: str) -> str:
    """Return the architectures to compile for, as TORCH_CUDA_ARCH_LIST spells them."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").strip(";")
    if given and given != "native":
        return given
    cards = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    codes = ask([f"{cuda_home}/bin/nvcc", "--list-gpu-code"])
    names = {
        # wgmma and TMA exist in the architecture-specific 9.0a alone.
        "9.0a" if card == (9, 0) else "{}.{}".format(*card)
        for card in cards
        if "sm_{}{}".format(*card) in codes.split()
    }
    return ";".join(sorted(names)) if cards and len(names) == len(cards) else ANY_CARD


torch = import_torch()
cuda_home = find_cuda_home()
with_cuda = use_cuda(torch, cuda_home)
archs = ""
if with_cuda:
    archs = os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_archs(torch, cuda_home)
    os.environ["CUDA_HOME"] = cuda_home  # read when cpp_extension is imported

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


class BuildExt(BuildExtension):
    """Writes what _C was built for beside it, and never takes another torch's objects for its own."""

    def finalize_options(self):
        super().finalize_options()
        kind = f"torch{torch.__version__}-{'cuda' if with_cuda else 'cpu'}"
        python = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        # One place for wheels, editable installs and --inplace, so that each finds the others' objects.
        self.build_temp = str(ROOT / "build" / f"temp.{python}-{kind}")
        # Whether an object is up to date is for ninja to say, which knows the command and the headers.
        self.force = True

    def run(self):
        super().run()
        info = Path(self.get_ext_fullpath("minivllm._C")).parent / "_build_info.py"
        info.write_text(
            '"""What this build of minivllm was compiled for. Written by setup.py."""\n\n'
            f'TORCH = "{torch.__version__}"\n'
            f'CUDA = "{torch.version.cuda if with_cuda else ""}"\n'
            f'CUDA_ARCHS = "{archs}"\n'
        )


def extension():
    """Describe minivllm._C."""
    sources = sorted(str(p.relative_to(ROOT)) for d in ("csrc", "csrc/cpu") for p in (ROOT / d).glob("*.cpp"))
    # OpenMP is compiled for but not linked: its symbols come from the runtime that torch loads, so that
    # torch.set_num_threads governs both and there is one pool of threads.
    cxx = ["-O3", "-g0", "-Wall", "-fopenmp", "-fvisibility=hidden"]
    if not with_cuda:
        return CppExtension("minivllm._C", sources, extra_compile_args={"cxx": cxx})
    sources += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda").glob("*.cu"))
    macros = [("MINIVLLM_WITH_CUDA", "1")]
    nvcc = ["-O3", "-Xcompiler=-fvisibility=hidden"]
    return CUDAExtension("minivllm._C", sources, define_macros=macros, extra_compile_args={"cxx": cxx, "nvcc": nvcc})


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt})
