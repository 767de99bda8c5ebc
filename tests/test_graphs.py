"""Captured decode steps: their sizes, and what happens where the memory for one is missing."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from engines import greedy, outcomes, prompt, tiny_engine

from minivllm.graphs import Graph, Graphs

P = [prompt(9), prompt(4), prompt(17)]


def graphs_that_fail(monkeypatch, *errors) -> tuple[Graphs, list[int]]:
    """Return graphs whose first captures raise these, and the rows of all captures as they come."""
    left, asked = list(errors), []

    def capture(self, rows, record):
        asked.append(rows)
        if left:
            raise left.pop(0)
        return Graph(None, rows, torch.empty(rows, 1), torch.empty(rows))

    monkeypatch.setattr(Graphs, "_capture", capture)
    return Graphs(torch.device("cpu"), 20, 1), asked


def test_sizes_are_few_and_hold_the_rows():
    graphs = Graphs(torch.device("cpu"), 20, 1)
    sizes = [graphs.size_of(rows) for rows in range(1, 21)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 20]
    many = Graphs(torch.device("cpu"), 300, 1)
    found = [many.size_of(rows) for rows in (64, 65, 128, 129, 160, 161, 256, 257, 289)]
    assert found == [64, 128, 128, 160, 160, 192, 256, 288, 300]


def test_a_size_is_captured_once(monkeypatch):
    graphs, asked = graphs_that_fail(monkeypatch)
    assert graphs.get(5, None) is graphs.get(8, None) is not graphs.get(9, None)
    assert asked == [8, 16]


def test_idle_memory_is_given_back_before_a_size_is_given_up(monkeypatch):
    graphs, asked = graphs_that_fail(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graphs.get(3, None).rows == 4
    assert asked == [4, 4]


def test_a_size_without_memory_is_told_of_once(monkeypatch):
    lack = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
    graphs, asked = graphs_that_fail(monkeypatch, *lack, *lack)
    with pytest.warns(RuntimeWarning, match="no memory for a CUDA graph of 4 rows"):
        assert graphs.get(3, None) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graphs.get(3, None) is None and graphs.get(9, None) is None
        assert graphs.get(1, None).rows == 1
    assert asked == [4, 4, 16, 16, 1]


def test_another_error_is_raised(monkeypatch):
    graphs, _ = graphs_that_fail(monkeypatch, RuntimeError("a kernel that cannot be captured"))
    with pytest.raises(RuntimeError, match="cannot be captured"):
        graphs.get(1, None)


@pytest.mark.gpu
def test_steps_without_a_graph_answer_alike(path, monkeypatch):
    params = greedy(12, logprobs=2)
    with tiny_engine(path, "cuda", cuda_graphs=False) as engine:
        want = outcomes(engine.generate(P, params))
    with tiny_engine(path, "cuda", cuda_graphs=True) as engine:
        forward, collecting = engine._runner.model.forward, []

        def starved(inputs, *rest):
            if torch.cuda.is_current_stream_capturing():
                collecting.append(gc.isenabled())
                if len(inputs.token_ids) == 3:
                    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # more than there can be
            return forward(inputs, *rest)

        monkeypatch.setattr(engine._runner.model, "forward", starved)
        with pytest.warns(RuntimeWarning, match="no memory for a CUDA graph of"):
            assert outcomes(engine.generate(P, params)) == want
        assert outcomes(engine.generate(P[:1], params)) == want[:1], "another size is captured"
        assert outcomes(engine.generate(P, params)) == want
        assert {rows: graph is None for rows, graph in engine._runner._graphs._known.items()}[1] is False
        assert collecting and not any(collecting) and gc.isenabled()
        engine.check_integrity()


@pytest.mark.gpu
def test_a_step_behind_a_running_one_starts_where_that_ends(path):
    with tiny_engine(path, torch.device("cuda")) as engine:
        runner = engine._runner
        runner._turn = 1
        started, ended = runner._begin()
        assert started is runner._events[1][0], "nothing was running"
        torch.cuda._sleep(50_000_000)
        ended.record()
        runner._turn = 2
        assert runner._begin() == (ended, runner._events[2][1])
        torch.cuda.synchronize()
        runner._turn = 3
        assert runner._begin() == runner._events[3]
