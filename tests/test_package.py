"""The package as a package: what an import costs, and what a build says that does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import gpu_report
import pytest
import torch

import minivllm
from minivllm import _extension

ARCHS = ("8.0", "9.0a")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


def build(monkeypatch, *, torch_version=torch.__version__, cuda="", archs=()):
    """Let the extension claim another build; what load() found before is forgotten."""
    info = _extension.BuildInfo(str(torch_version), cuda, archs)
    monkeypatch.setattr(_extension, "build_info", lambda: info)
    _extension.load.cache_clear()


@pytest.fixture(autouse=True)
def _fresh_load():
    yield
    _extension.load.cache_clear()


@pytest.mark.parametrize("names", [[], ["BatchEngine", "SamplingParams"]])
def test_import_is_quick(names):
    code = (
        "import time, torch; start = time.process_time(); import minivllm\n"
        f"for name in {names}: getattr(minivllm, name)\n"
        "print(time.process_time() - start)"
    )
    # The processor's time, and the least of several runs: what else the machine does only ever adds to it.
    seconds = []
    while len(seconds) < 8 and min(seconds, default=1.0) > 0.3:
        seconds.append(float(run_python(code)))
    assert min(seconds) <= 0.3, f"seconds beyond `import torch`: {seconds}"


def test_import_leaves_cuda_alone():
    opened = run_python(
        "import os, torch, minivllm\n"
        "minivllm.BatchEngine, minivllm.SamplingParams\n"
        "from minivllm import _extension; _extension.load()\n"
        "files = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')\n"
        "         if os.path.exists(f'/proc/self/fd/{n}')]\n"
        "print(torch.cuda.is_initialized(), [f for f in files if f.startswith('/dev/nvidia')])\n"
    )
    assert opened.strip() == "False []"


def test_public_names():
    assert set(minivllm.__all__) <= set(dir(minivllm))
    for name in minivllm.__all__:
        assert getattr(minivllm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        minivllm.Engine  # noqa: B018


def test_version_is_the_distributions():
    try:
        assert metadata.version("minivllm") == minivllm.__version__
    except metadata.PackageNotFoundError:
        pytest.skip("minivllm is built in place here and not installed")


def test_build_info_is_of_this_torch():
    info = _extension.build_info()
    assert info.torch == torch.__version__
    assert bool(info.cuda) == bool(info.archs)
    assert _extension.load() is sys.modules["minivllm._C"]


@pytest.mark.parametrize("other", ["2.9.1", "2.99.0+cu130", "3.0.0a0+git123"])
def test_another_torch_is_named(monkeypatch, other):
    build(monkeypatch, torch_version=other)
    with pytest.raises(ImportError) as caught:
        _extension.load()
    assert f"compiled for torch {other} (" in str(caught.value)
    assert f"torch {torch.__version__} (" in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_another_cuda_is_named(monkeypatch):
    build(monkeypatch, cuda="9.2", archs=ARCHS)
    with pytest.raises(ImportError, match=r"\(CUDA 9\.2\) and torch .* is installed"):
        _extension.load()


def test_a_patch_release_of_torch_is_the_same_torch(monkeypatch):
    build(monkeypatch, torch_version=".".join(torch.__version__.split(".")[:2]) + ".99")
    assert _extension.load() is sys.modules["minivllm._C"]


def test_what_the_loader_says_is_passed_on(monkeypatch):
    def undefined(name: str):
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(_extension, "import_module", undefined)
    monkeypatch.setattr(_extension, "build_info", lambda: _extension.BuildInfo(torch.__version__, "", ()))
    _extension.load.cache_clear()
    with pytest.raises(ImportError, match=r"minivllm was compiled for torch .*undefined symbol"):
        _extension.load()


def test_not_compiled_at_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "minivllm._build_info", None)
    _extension.build_info.cache_clear()
    try:
        with pytest.raises(ImportError, match="have not been compiled: run `pip install"):
            _extension.load()
    finally:
        _extension.build_info.cache_clear()


def test_a_cpu_build_asked_for_cuda(monkeypatch):
    build(monkeypatch)
    with pytest.raises(RuntimeError, match="'cuda:1' was asked for and this minivllm was compiled for the CPU"):
        _extension.check_cuda(torch.device("cuda:1"))


def test_no_card(monkeypatch):
    build(monkeypatch, cuda="13.0", archs=ARCHS)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    assert not _extension.has_cuda()
    with pytest.raises(RuntimeError, match="sees no CUDA card"):
        _extension.check_cuda(torch.device("cuda"))


def test_a_card_without_code(monkeypatch):
    build(monkeypatch, cuda="13.0", archs=ARCHS)
    card = SimpleNamespace(
        is_available=lambda: True,
        get_device_capability=lambda device: (12, 0),
        get_device_name=lambda device: "Card 5000",
    )
    monkeypatch.setattr(torch, "cuda", card)
    with pytest.raises(RuntimeError) as caught:
        _extension.check_cuda(torch.device("cuda"))
    assert "Card 5000 has compute capability 12.0" in str(caught.value)
    assert "compiled for 8.0, 9.0a" in str(caught.value)
    card.get_device_capability = lambda device: (8, 6)
    _extension.check_cuda(torch.device("cuda"))


@pytest.mark.parametrize(
    ("arch", "runs", "does_not"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("8.0+PTX", [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        ("9.0a", [(9, 0)], [(8, 0), (10, 0), (12, 0)]),
        ("9.0a+PTX", [(9, 0)], [(10, 0)]),
        ("12.0", [(12, 0), (12, 1)], [(10, 0), (9, 0)]),
    ],
)
def test_runs_on(arch, runs, does_not):
    assert all(_extension.runs_on(arch, card) for card in runs)
    assert not any(_extension.runs_on(arch, card) for card in does_not)


def test_gpu_report_follows_the_code(monkeypatch, tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "tests").mkdir()
    kernel, gpu_test = tmp_path / "csrc/a.cu", tmp_path / "tests/test_a.py"
    other, unrelated = tmp_path / "tests/test_b.py", tmp_path / "csrc/notes.txt"
    kernel.write_text("one")
    gpu_test.write_text("def test_a(device): ...")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    hashes = [gpu_report.code_hash()]
    other.write_text("def test_b(): ...")
    unrelated.write_text("")
    assert gpu_report.code_hash() == hashes[0]
    for file, text in [(kernel, "two"), (gpu_test, "def test_a(device): pass"), (kernel, "one")]:
        file.write_text(text)
        hashes.append(gpu_report.code_hash())
    kernel.rename(kernel.with_name("b.cu"))
    hashes.append(gpu_report.code_hash())
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("def test_a(device): ...", True),
        ("def test_a(make, seed): ...", True),
        ("@pytest.mark.gpu\ndef test_a(): ...", True),
        ("def test_a(path): ...", False),
        ("def make(device): ...", False),
    ],
)
def test_what_the_gpu_report_takes_for_a_gpu_test(text, is_one):
    assert (gpu_report.GPU_TEST.search(text) is not None) == is_one


def test_the_gpu_report_fails_where_a_process_crashed(monkeypatch, tmp_path):
    came = {"a": (0, {"passed": 3}), "b": (-11, {"failed": 1}), "c": (5, {})}
    files = [tmp_path / f"test_{name}.py" for name in came]
    monkeypatch.setattr(gpu_report, "covered_files", lambda: files)
    monkeypatch.setattr(gpu_report, "code_hash", lambda: "f" * 64)
    monkeypatch.setattr(gpu_report, "REPORT", tmp_path / "report.json")
    monkeypatch.setattr(gpu_report, "run_apart", lambda file, folder: came[file.stem.removeprefix("test_")])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert gpu_report.make_report(1) != 0
    assert "3 passed, 1 failed, 0 skipped)" in gpu_report.describe()
    came["b"] = (0, {"passed": 1})
    assert gpu_report.make_report(1) == 0, "a file without GPU tests is no failure"


@pytest.mark.parametrize("held", ["{", "", "[]", '{"card": "x"}', '{"counts": 3}'])
def test_a_damaged_gpu_report_is_said_to_be_one(monkeypatch, tmp_path, held):
    monkeypatch.setattr(gpu_report, "REPORT", tmp_path / "report.json")
    gpu_report.REPORT.write_text(held)
    assert "is damaged" in gpu_report.describe()
    monkeypatch.setattr(gpu_report, "covered_files", lambda: [tmp_path / "test_a.py"])
    monkeypatch.setattr(gpu_report, "code_hash", lambda: "f" * 64)
    monkeypatch.setattr(gpu_report, "run_apart", lambda file, folder: (0, {"passed": 1}))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert gpu_report.make_report(1) == 0
    assert "1 passed" in gpu_report.describe()


def test_an_interrupt_ends_the_gpu_report(monkeypatch, tmp_path):
    begun = []

    def run(file, folder):
        begun.append(file)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_report, "covered_files", lambda: [tmp_path / f"test_{i}.py" for i in range(50)])
    monkeypatch.setattr(gpu_report, "code_hash", lambda: "f" * 64)
    monkeypatch.setattr(gpu_report, "REPORT", tmp_path / "report.json")
    monkeypatch.setattr(gpu_report, "run_apart", run)
    with pytest.raises(KeyboardInterrupt):
        gpu_report.make_report(1)
    assert len(begun) < 50


def test_the_gpu_report_names_what_was_not_run(monkeypatch, tmp_path):
    files = [tmp_path / f"test_{name}.py" for name in "abc"]

    def stop_at_the_last(file, folder):
        if file.stem == "test_c":
            raise KeyboardInterrupt
        return 0, {"passed": 2}

    monkeypatch.setattr(gpu_report, "covered_files", lambda: files)
    monkeypatch.setattr(gpu_report, "code_hash", lambda: "f" * 64)
    monkeypatch.setattr(gpu_report, "REPORT", tmp_path / "report.json")
    monkeypatch.setattr(gpu_report, "run_apart", stop_at_the_last)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    with pytest.raises(KeyboardInterrupt):
        gpu_report.make_report(1)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["not_run"] == ["test_c.py"] and set(report["seconds"]) == {"test_a.py", "test_b.py"}
    assert "4 passed, 0 failed, 0 skipped, 1 files not run)" in gpu_report.describe()
