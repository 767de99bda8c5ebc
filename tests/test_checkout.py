"""The checkout itself: what its source says where it was not compiled, and what its Makefile and README promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm import _extension

ROOT = Path(__file__).parent.parent
with_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
# An editable install of this very package would lend its kernels to the one that is looked at.
LOAD = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "_EditableFinder" not in repr(finder)]
from minivllm import _extension
try:
    _extension.load()
except ImportError as error:
    print(error)
"""


def package(folder: Path, *, setup: bool = False, compiled: bool = False) -> Path:
    """Make a folder with as much of the package as says that its kernels are missing."""
    (folder / "minivllm").mkdir(parents=True)
    for name in ("__init__.py", "_extension.py"):
        shutil.copy(ROOT / "minivllm" / name, folder / "minivllm")
    if setup:
        (folder / "setup.py").touch()
    if compiled:
        (folder / "minivllm" / "_build_info.py").touch()
    return folder


def said(folder: Path, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", LOAD], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
    return done.stdout


def test_a_source_folder_in_front_of_an_installed_package(tmp_path):
    source, home = package(tmp_path / "source", setup=True), package(tmp_path / "home", compiled=True)
    text = said(source, home)
    assert f"`pip install -e .` in {source}" in text and f"leave that folder for the compiled one in {home}" in text
    assert "force-reinstall" not in text


def test_a_source_folder_and_no_installed_package(tmp_path):
    source, unbuilt = package(tmp_path / "source", setup=True), package(tmp_path / "unbuilt")
    text = said(source, unbuilt)
    assert "`pip install -e .`" in text and "leave that folder" in text and str(unbuilt) not in text


def test_an_installed_package_without_kernels(tmp_path):
    assert "--force-reinstall --no-deps .` where its source lies" in said(package(tmp_path / "home"))


def test_the_advice_to_build_again_puts_the_kernels_where_the_package_is(monkeypatch, tmp_path):
    for setup, command in ((True, "--no-deps -e ."), (False, "--no-deps .")):
        folder = package(tmp_path / str(setup), setup=setup)
        monkeypatch.setattr(_extension, "_PACKAGE", folder / "minivllm")
        assert _extension.rebuild_command().endswith(command)
        monkeypatch.setattr(_extension, "build_info", lambda: _extension.BuildInfo("2.1.0", "", ()))
        _extension.load.cache_clear()
        with pytest.raises(ImportError, match=re.escape(f"{command}`")):
            _extension.load()
    _extension.load.cache_clear()


@with_make
@pytest.mark.parametrize("target", ["demo", "test"])
@pytest.mark.parametrize(("given", "policy"), [(None, "passive"), ("active", "active")])
def test_make_lets_waiting_threads_sleep(tmp_path, target, given, policy):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "setup.py").touch()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$OMP_WAIT_POLICY" >> ran\n')
    python.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY" and not k.startswith("MAKE")}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    command = ["make", target, "VENV=", f"PYTHON={python}"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    ran = (tmp_path / "ran").read_text().split()
    assert ran and set(ran) == {policy}


def extras() -> set[str]:
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    return set(re.findall(r"^(\w+) = \[", table.partition("\n[")[0], re.MULTILINE)) - {"dev"}


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_pages_name_every_extra_and_where_the_demo_model_goes(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert {"server", "plot", "gguf"} <= extras()
    for extra in extras():
        assert f"'.[{extra}]'" in text, extra
    assert "~/.cache/minivllm" in text and "$MINIVLLM_CACHE" in text


@with_make
def test_make_clean_leaves_the_demo_model():
    recipe = (ROOT / "Makefile").read_text().partition("\nclean:\n")[2]
    assert "cache" not in recipe
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "~/.cache/minivllm" in done.stdout and "the demo model stays" in done.stdout
