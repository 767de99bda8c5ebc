"""What each public name of the engine promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import assert_empty, greedy, tiny_engine

from minivllm.request import (
    Delta,
    Generation,
    RequestError,
    SamplingParams,
)

P = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15], [16, 17, 18, 19, 20]]


# -------------------------------------------------------------------- generate


def test_generate_gives_one_answer_a_prompt_in_order(engine):
    params = [greedy(30), greedy(1), greedy(20), greedy(2)]
    answers = engine.generate(P, params)
    assert [type(g) for g in answers] == [Generation] * 4
    assert [g.index for g in answers] == [0, 1, 2, 3]
    assert [g.prompt_token_ids for g in answers] == P
    assert [len(g.token_ids) for g in answers] == [30, 1, 20, 2]
    assert [g.finish_reason for g in answers] == ["length"] * 4
    assert all(g.error is None and g.prompt is None for g in answers)
    again = engine.generate(P, params)
    assert [(g.index, g.token_ids, g.text) for g in again] == [(g.index, g.token_ids, g.text) for g in answers]


ARRAYS = [np.array([5, 6, 7]), np.array([5, 6, 7], np.uint8), list(np.array([5, 6, 7])), torch.tensor([5, 6, 7])]


@pytest.mark.parametrize("prompt", ["hello", [5, 6, 7], (5, 6, 7), [5, np.int32(6), 7], *ARRAYS])
def test_one_prompt_may_stand_alone(engine, prompt):
    [alone] = engine.generate(prompt, greedy(3))
    [listed] = engine.generate([prompt], greedy(3))
    assert alone.token_ids == listed.token_ids and len(alone.token_ids) == 3
    assert alone.prompt == ("hello" if isinstance(prompt, str) else None)
    ids = engine.tokenizer.encode("hello") if isinstance(prompt, str) else [5, 6, 7]
    assert alone.prompt_token_ids == ids and {type(i) for i in alone.prompt_token_ids} == {int}


def test_text_and_ids_mix_and_none_is_none(engine):
    answers = engine.generate(["hello", [5, 6]], greedy(2))
    assert [g.prompt for g in answers] == ["hello", None]
    assert engine.generate([], greedy(2)) == []


def test_default_params_run_to_the_limit(path, device):
    with tiny_engine(path, device, max_seq_len=23) as engine:
        [g] = engine.generate([P[0]])
        assert (g.finish_reason == "length" and len(g.token_ids) == 20) or g.finish_reason == "stop"
        assert SamplingParams().max_tokens is None and SamplingParams().temperature == 0


def test_params_are_as_many_as_prompts(engine):
    for params in ([greedy(1)], [greedy(1)] * 3, []):
        with pytest.raises(ValueError, match=f"2 prompts and {len(params)} params"):
            engine.generate(P[:2], params)
    for wrong in ("x", {"max_tokens": 1}, [None, None], 7):
        with pytest.raises(TypeError):
            engine.generate(P[:2], wrong)
    with pytest.raises(ValueError, match="on_error"):
        engine.generate(P, on_error="ignore")
    assert engine.stats.requests == 0


NO_IDS = [[1.5], ["a"], [True], [5, True], [5, 6.0], [5, "6"], [5, None], [5, [6]], [5, object()], [5, b"6", 2**40]]


@pytest.mark.parametrize("prompts", [None, 7, b"x", {"a": 1}, [None], np.array([1.5, 2.0]), *([ids] for ids in NO_IDS)])
def test_what_is_no_prompt_is_a_type_error(engine, prompts):
    with pytest.raises(TypeError):
        engine.generate(prompts)
    assert engine.stats.requests == 0


def test_progress_shows_a_bar(engine, capsys):
    engine.generate(P, greedy(2), progress=True)
    shown = capsys.readouterr()
    assert "4/4" in shown.err and not shown.out


# -------------------------------------------------------------------- chat


def test_chat_is_the_template_and_then_generate(engine):
    talk = [{"role": "user", "content": "hi"}]
    [g] = engine.chat(talk, greedy(4))
    assert g.prompt_token_ids == engine.tokenizer.apply_chat_template(talk)
    assert g.prompt_token_ids.count(engine.config.bos_token_id or 0) == 1, "begin-of-text once"
    assert g.token_ids == engine.generate([g.prompt_token_ids], greedy(4))[0].token_ids
    both = engine.chat([talk, [*talk, {"role": "assistant", "content": "hello"}, *talk]], greedy(4))
    assert both[0].token_ids == g.token_ids and len(both) == 2


@pytest.mark.parametrize("talk", [[[]], "hi", [["hi"]], [{"content": "x"}], [[{"role": 1, "content": "x"}]]])
def test_what_is_no_conversation(engine, talk):
    with pytest.raises((TypeError, ValueError)):
        engine.chat(talk)
    assert engine.stats.requests == 0


def test_a_bad_conversation_spares_the_others(engine):
    talks = [[{"role": "user", "content": "hi"}], [], [{"role": "user", "content": 3}], ["hi"]]
    first, *others = engine.chat(talks, greedy(3), on_error="return")
    assert first.error is None and len(first.token_ids) == 3
    assert [g.finish_reason for g in others] == ["error"] * 3 and [g.index for g in others] == [1, 2, 3]
    assert "conversation 1 is empty" in others[0].error


# -------------------------------------------------------------------- stream, submit, Handle


def test_stream_joins_to_the_answer(engine):
    want = engine.generate(["hello there", *P[1:]], greedy(9))
    texts, tokens, reasons = [""] * 4, [[] for _ in P], [[] for _ in P]
    for delta in engine.stream(["hello there", *P[1:]], greedy(9)):
        assert isinstance(delta, Delta) and delta.sample == 0
        texts[delta.index] += delta.text
        tokens[delta.index] += delta.token_ids
        reasons[delta.index].append(delta.finish_reason)
    assert texts == [g.text for g in want]
    assert tokens == [g.token_ids for g in want]
    assert [r[-1] for r in reasons] == ["length"] * 4
    assert all(x is None for r in reasons for x in r[:-1])


def test_stream_comes_as_tokens_come(engine):
    stream = engine.stream(P[0], greedy(20))
    first = next(stream)
    assert len(first.token_ids) == 1 and engine.slots[0].request_id == 0
    rest = list(stream)
    assert 1 + sum(len(d.token_ids) for d in rest) == 20 and len(rest) >= 18


@pytest.mark.parametrize("how", ["close", "del", "with", "break"])
def test_a_stream_that_ends_early_cancels_what_is_left(engine, how):
    stream = engine.stream(P, greedy(40))
    next(stream), next(stream)
    if how == "close":
        stream.close()
        stream.close()
    elif how == "with":
        with stream:
            pass
    elif how == "break":
        for _ in stream:
            break
    del stream
    assert engine.stats.cancelled == 4
    assert_empty(engine)
    assert len(engine.generate(P[0], greedy(3))[0].token_ids) == 3


def test_stream_checks_before_it_starts(engine):
    with pytest.raises(ValueError, match="prompt 1"):
        engine.stream([[5], []])
    assert engine.queue == []


def test_handle(engine):
    [want] = engine.generate(P[1], greedy(6))
    handle = engine.submit(P[1], greedy(6))
    assert not handle.done and handle.request_id == 1 and "queued" in repr(handle)
    engine.step()
    assert "running" in repr(handle) and not handle.done
    deltas = list(handle)
    assert [t for d in deltas for t in d.token_ids] == want.token_ids
    assert handle.done and "ended" in repr(handle)
    assert handle.result().token_ids == handle.result().token_ids == want.token_ids
    assert [t for d in handle for t in d.token_ids] == want.token_ids, "from the beginning, again"
    handle.cancel()
    assert handle.result().finish_reason == "length", "an ended one stays as it ended"


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_keeps_what_there_is(engine, steps):
    [want] = engine.generate(P[1], greedy(20))
    handle = engine.submit(P[1], greedy(20))
    for _ in range(steps):
        engine.step()
    handle.cancel()
    assert handle.done
    answer = handle.result()
    assert answer.finish_reason == "cancelled" and answer.error is None
    assert answer.token_ids == want.token_ids[: len(answer.token_ids)]
    assert len(answer.token_ids) in (steps, max(steps - 1, 0))
    assert_empty(engine)


def test_result_of_a_failed_request(engine):
    def fn(tokens, logits):
        if len(tokens) == 5:
            raise ZeroDivisionError("two tokens in")

    handle = engine.submit(P[0], greedy(9, logits_fn=fn))
    other = engine.submit(P[1], greedy(4))
    with pytest.raises(RequestError, match="ZeroDivisionError: two tokens in") as caught:
        handle.result()
    assert len(caught.value.generation.token_ids) == 2
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert other.result().finish_reason == "length"


def test_step_by_hand(engine):
    engine.submit(P[0], greedy(1)), engine.submit(P[1], greedy(3))
    ended = []
    for _ in range(5):
        ended += engine.step()
    assert [(g.request_id, len(g.token_ids)) for g in ended] == [(0, 1), (1, 3)]
    assert engine.step() == []
