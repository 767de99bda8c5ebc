"""Devices, time limits, the demo model, and what the summary says about the tests that did not run here."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import gpu_report
import hypothesis
import pytest
import torch

from minivllm import _extension

TIME_LIMIT = 120.0  # seconds a test may take, unless its marker time_limit says another number
HANG_LIMIT = 900.0  # seconds after which a test that no signal reaches ends the run

# The same examples in every run of CI; new ones at a desk. Either way a failure prints how to repeat it.
hypothesis.settings.register_profile("minivllm", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("minivllm")

_stderr = pytest.StashKey[int]()
_gpu_tests = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA card and kernels that were compiled for it")
    config.addinivalue_line("markers", f"time_limit(seconds): instead of {TIME_LIMIT:.0f} seconds")
    config.stash[_stderr] = os.dup(2)  # pytest redirects 2 itself while a test runs


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def why_no_gpu() -> str | None:
    """Say why the GPU tests cannot run here, or None where they can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA card"
    if not _extension.build_info().cuda:
        return "minivllm was compiled without CUDA"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[_gpu_tests] = len(gpu)
    if gpu and why_no_gpu():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    gpu_tests = config.stash.get(_gpu_tests, 0)
    if gpu_tests:
        terminalreporter.write_sep("=", "GPU tests", bold=True)
        if reason := why_no_gpu():
            terminalreporter.write_line(f"{gpu_tests} GPU tests were not run here: {reason}.")
        if gpu_report.RUNNING not in os.environ:
            terminalreporter.write_line(gpu_report.describe())


class OutOfTime(BaseException):
    """Not an Exception, so that neither the code under test nor hypothesis takes it for its own."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    # For a hang inside compiled code, which a Python signal handler never interrupts.
    faulthandler.dump_traceback_later(HANG_LIMIT, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    marker = item.get_closest_marker("time_limit")
    seconds = float(marker.args[0]) if marker else TIME_LIMIT

    def out_of_time(signum, frame):
        raise OutOfTime(f"{item.nodeid} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the kernels exist for; the CUDA variant of a test carries the marker gpu."""
    return torch.device(request.param)


@pytest.fixture
def on_hopper() -> None:
    """Skip what is about kernels that Hopper alone has, on another card."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for Hopper")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the directory of SmolLM2-135M-Instruct in the Hugging Face layout."""
    from examples.demo_model import demo_model

    try:
        return Path(demo_model())
    except Exception as error:
        if gpu_report.RUNNING in os.environ:  # the card's machine may reach no registry
            pytest.skip(f"the demo model is not here: {error}")
        raise


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny random Llama with a tokenizer."""
    from tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(path: Path, device: torch.device):
    """Give an engine on the tiny model that must be empty again at the end."""
    from engines import assert_empty, tiny_engine

    with tiny_engine(path, device) as engine:
        yield engine
        if not engine._closed:
            assert_empty(engine)


@pytest.fixture
def make(path: Path, device: torch.device):
    """Give a function that makes such engines, of blocks of 4 tokens."""
    from engines import assert_empty, tiny_engine

    engines = []

    def make(**sizes):
        engines.append(tiny_engine(path, device, **{"block_size": 4, **sizes}))
        return engines[-1]

    yield make
    for engine in engines:
        assert_empty(engine)
        engine.close()
