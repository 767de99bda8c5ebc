"""The examples in the docstrings of the engine's public names, run."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
from engines import tiny_engine

from minivllm import BatchEngine, Delta, Generation, Handle, SamplingParams

MODULES = ["engine", "calls", "handle", "request", "timeline", "views", "aio"]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
NEED_EXAMPLES = [
    BatchEngine,
    BatchEngine.generate,
    BatchEngine.chat,
    BatchEngine.stream,
    BatchEngine.submit,
    BatchEngine.load,
    BatchEngine.step,
    BatchEngine.check_integrity,
    BatchEngine.close,
    Handle,
    Handle.result,
    Handle.cancel,
    Handle.fork,
    Handle.save,
    SamplingParams,
]


def examples_of(module: str) -> list[doctest.DocTest]:
    return [
        t for t in doctest.DocTestFinder(exclude_empty=True).find(import_module(f"minivllm.{module}")) if t.examples
    ]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module(module, path, tmp_path, device):
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in examples_of(module):
        with tiny_engine(path, device, num_slots=2) as engine:
            names = {
                "engine": engine,
                "model": path,
                "tmp": tmp_path,
                "BatchEngine": BatchEngine,
                "SamplingParams": SamplingParams,
                "Delta": Delta,
                "Generation": Generation,
            }
            test.globs.update(names)
            report: list[str] = []
            failures = runner.run(test, out=report.append, clear_globs=True).failed
            assert not failures, "".join(report)
            engine.check_integrity()


def test_the_names_of_the_contract_have_examples():
    """Each public call shows its use, in its own docstring or, for the small ones, in its class's."""
    text = {name: getattr(name, "__doc__", "") or "" for name in NEED_EXAMPLES}
    whole = "\n".join(e.source for m in MODULES for t in examples_of(m) for e in t.examples)
    for name in NEED_EXAMPLES:
        called = f".{name.__name__}(" in whole or f"{name.__name__}(" in whole
        assert ">>>" in text[name] or called, f"{name.__qualname__} is shown nowhere"
    for name in ("slots", "queue", "free_blocks", "block_table", "stats", "timeline"):
        assert f".{name}" in whole, f"engine.{name} is shown nowhere"
