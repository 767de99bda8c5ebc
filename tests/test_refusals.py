"""What is refused at once, and in one short sentence: odd tensors as prompts, long texts, flags that are no bools."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from engines import assert_empty, fake_engine, greedy, tiny_engine
from tiny import tiny_model

from minivllm import AsyncEngine, BatchEngine, Handle


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("refusals"))


UNREADABLE = {
    "meta": torch.tensor([4, 5], device="meta"),
    "sparse": torch.tensor([4, 5]).to_sparse(),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_tensor_that_cannot_be_read_is_no_prompt(name):
    engine, odd = fake_engine(), UNREADABLE[name]
    for call in (engine.submit, engine.generate, engine.stream):
        with pytest.raises(TypeError, match="must be a str or a list of ints"):
            call(odd)
    bad, good = engine.generate([odd, [4, 5]], greedy(2), on_error="return")
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert_empty_but_cached(engine)


def assert_empty_but_cached(engine):
    engine.check_integrity()
    assert engine.queue == [] and not engine._requests and not any(engine._scheduler.pool.refs)


def test_a_refusal_shows_the_beginning_of_what_was_given_on_one_line(path):
    engine = tiny_engine(path)
    calls = [
        lambda: engine.submit(np.zeros((3, 3))),
        lambda: engine.submit([10**5000, True]),
        lambda: engine.chat([["x" * 100_000]]),
        lambda: engine.chat([[{"role": 5, "content": "x" * 100_000}]]),
        lambda: engine.generate("a", on_error="x" * 100_000),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        text = str(error.value)
        assert len(text) < 250 and "\n" not in text
        assert text.startswith(("prompt 0 must be", "conversation 0: ", "on_error must be"))
    assert_empty(engine)


@pytest.mark.parametrize("name", ["prefix_caching", "cuda_graphs", "exact", "progress"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_flag_that_is_no_bool_is_refused_before_anything_is_read(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a bool"):
        tiny_engine("/nowhere", **{name: value})


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_sampling_parameters_as_keywords_of_chat_are_refused_before_anything_runs(path, on_error):
    with tiny_engine(path) as engine:
        for name in ("max_tokens", "temperature", "seed"):
            with pytest.raises(TypeError, match=rf"params=SamplingParams\({name}="):
                engine.chat([{"role": "user", "content": "hi"}], on_error=on_error, **{name: 3})
        assert engine.stats.requests == 0
        assert len(engine.chat([{"role": "user", "content": "hi"}], greedy(2), thinking=True)) == 1


def test_no_other_call_swallows_keywords():
    calls = [getattr(owner, name) for owner in (BatchEngine, AsyncEngine) for name in ("generate", "stream", "submit")]
    for call in [*calls, AsyncEngine.chat, BatchEngine, Handle.fork, BatchEngine.load]:
        kinds = [parameter.kind for parameter in inspect.signature(call).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds, call


def test_a_bad_prompt_is_named_in_a_sentence(path):
    with tiny_engine(path) as engine:
        with pytest.raises(ValueError, match=r"^prompt 1 is empty$"):
            engine.generate(["a", ""])
        with pytest.raises(TypeError, match=r"^prompt 0 must be a str"):
            engine.submit(5)
