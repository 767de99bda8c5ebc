"""What is refused at once, and in one short sentence: odd tensors as prompts, long texts, flags that are no bools."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from engines import FAKE_VOCAB, assert_empty, fake_engine, greedy, tiny_engine
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


DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]

# Lists of ints are checked together: one that is bad must be found among good ones, and harm none of them.
BAD = {
    "a bool": ([5, True], "prompt 1 must be a str or a list of ints"),
    "a float": ([5, 1.5, 6], "prompt 1 must be a str or a list of ints"),
    "a text in a list": ([5, "i" * 5], "prompt 1 must be a str or a list of ints"),
    "nothing": ([], "prompt 1 is empty"),
    "lists without end": ([5, DEEP], "prompt 1 must be a str or a list of ints, not a list nested too deeply"),
    "a negative id": ([5, -1], "prompt 1: token id -1 at place 1 is outside the vocabulary"),
    "an id beyond 32 bits": ([2**40, 5], "prompt 1: token id 1099511627776 at place 0 is outside the vocabulary"),
    "an id beyond the vocabulary": ([5, 6, FAKE_VOCAB], f"prompt 1: token id {FAKE_VOCAB} at place 2 is outside"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_bad_list_among_good_ones_is_named_and_the_others_run(name):
    bad, message = BAD[name]
    engine, prompts = fake_engine(), [[4, 5], bad, (6, 7), [8, np.int64(9)], np.array([1, 2])]
    for call in (engine.generate, engine.stream):
        with pytest.raises((TypeError, ValueError), match=message):
            call(prompts)
    assert engine.stats.requests == 0
    answers = engine.generate(prompts, greedy(2), on_error="return")
    assert message in answers[1].error
    rest = [answers[i].prompt_token_ids for i in (0, 2, 3, 4)]
    assert rest == [[4, 5], [6, 7], [8, 9], [1, 2]] and {type(i) for ids in rest for i in ids} == {int}
    assert_empty_but_cached(engine)


def test_lists_that_a_caller_gave_or_got_are_the_callers():
    engine, prompts = fake_engine(), [[4, 5, 6], [7, 8]]
    stream = engine.stream(prompts, greedy(3))
    handle = engine.submit(prompts[0], greedy(3, logprobs=1, prompt_logprobs=1))
    prompts[0][:] = [9]
    assert sorted({delta.index for delta in stream}) == [0, 1]
    first = handle.result()
    for own in (first.prompt_token_ids, first.token_ids, first.logprobs, first.prompt_logprobs):
        own.clear()
    again = handle.result()
    assert (again.prompt_token_ids, len(again.token_ids)) == ([4, 5, 6], 3)
    assert (len(again.prompt_logprobs), len(again.logprobs)) == (3, 3)
    assert again.token_ids == engine.generate([4, 5, 6], greedy(3))[0].token_ids


def test_sampling_parameters_as_keywords_are_shown_their_place(path):
    engine = fake_engine()
    for call in (engine.generate, engine.stream, engine.submit):
        with pytest.raises(TypeError, match=rf"{call.__name__} takes no max_tokens: pass params=SamplingParams"):
            call([4, 5], max_tokens=3)
        with pytest.raises(TypeError, match=r"max_new_tokens: pass params=SamplingParams\(max_tokens=...\)"):
            call([4, 5], max_new_tokens=3)
        with pytest.raises(TypeError, match=rf"{call.__name__} takes no param, only prompts?, params"):
            call([4, 5], param=greedy(3))
    assert engine.stats.requests == 0


def test_a_cache_that_is_too_large_is_named_as_it_was_given(path):
    with pytest.raises(ValueError, match=f"kv_cache_bytes = {10**12} takes"):
        tiny_engine(path, num_blocks=None, kv_cache_bytes=10**12)
    with pytest.raises(ValueError, match=f"num_blocks = {10**9} takes"):
        tiny_engine(path, num_blocks=10**9)


def test_an_answer_does_not_change_while_a_fork_goes_on_with_its_prompt(path):
    with tiny_engine(path) as engine:
        handle = engine.submit([5, 6, 7, 8], greedy(3, prompt_logprobs=1))
        [fork] = handle.fork(1)
        handle.cancel()
        answer = handle.result()
        assert answer.prompt_logprobs == [None] * 4
        assert fork.result().prompt_logprobs[0] is None and fork.result().prompt_logprobs[1:] != [None] * 3
        assert answer.prompt_logprobs == [None] * 4


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
