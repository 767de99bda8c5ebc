"""Faults that engines of this kind have had, each as a test of its kind, in the engine as a whole."""

from __future__ import annotations

import random

import pytest
from engines import assert_empty, fake_answer, fake_engine, greedy, outcome, outcomes, prompt

from minivllm.request import RequestError, SamplingParams

B = 4  # block size of the engines here
V = 320


# -------------------------------------------------------------------- blocks, slots, life cycle


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B])
def test_a_prompt_that_is_cached_whole_still_has_a_token_to_compute(make, length):
    p, params = prompt(length), greedy(6, logprobs=3)
    [want] = outcomes(make(prefix_caching=False).generate([p], params))
    engine = make()
    assert outcomes(engine.generate([p], params)) == [want]
    assert outcomes(engine.generate([p], params)) == [want]
    assert outcomes(engine.generate([p, p], params)) == [want, want]
    assert engine.stats.cached_tokens == 3 * ((length - 1) // B * B)


def test_a_block_that_holds_another_text_now_is_not_hit(make):
    engine = make(num_blocks=6, num_slots=1)
    texts = [prompt(3 * B + 1, seed) for seed in range(6)]
    first = engine.generate([texts[0]], greedy(5, logprobs=1))[0]
    for text in texts[1:]:
        engine.generate([text], greedy(5))
    again = engine.generate([texts[0]], greedy(5, logprobs=1))[0]
    assert outcome(again) == outcome(first)
    assert again.stats.cached_tokens == 0, "six blocks of five other texts"


@pytest.mark.parametrize("drawn", [1, 5])
@pytest.mark.parametrize("length", [1, B, 2 * B + 1])
def test_a_preempted_request_is_computed_again(make, drawn, length):
    params = greedy(12, temperature=0.9, seed=3, logprobs=2, repetition_penalty=1.3)
    [want] = outcomes(make().generate([prompt(length)], params))
    for caching in (True, False):
        engine = make(prefix_caching=caching)
        handle = engine.submit(prompt(length), params)
        sequence = handle._request.sequences[0]
        while sequence.num_output < drawn:
            engine.step()
        with engine._turn():
            engine._collect(keep=0)
            engine._scheduler.preempt(sequence)
        engine.check_integrity()
        assert [(q.request_id, q.preemptions) for q in engine.queue] == [(0, 1)]
        assert outcome(handle.result()) == want
        assert handle.result().stats.preemptions == 1


def test_the_keys_of_a_chunk_end_with_the_chunk(make):
    p, params = prompt(3 * B + 5), greedy(6, logprobs=2)
    [want] = outcomes(make().generate([p], params))
    engine = make(max_step_tokens=7)
    handle = engine.submit(p, params)
    seen = []
    while not handle.done:
        engine.step()
        seen.append(engine.slots[0].num_computed)
    assert seen[:3] == [7, 14, 17]
    assert outcome(handle.result()) == want


def test_decode_and_prefill_of_the_same_tokens_agree(make):
    """At every length from 1 to two blocks: the step that decodes, and a prefill of all that came before."""
    engine = make(prefix_caching=False)
    [g] = engine.generate([prompt(1)], greedy(2 * B, logprobs=5))
    for t in range(2 * B):
        [again] = engine.generate([prompt(1) + g.token_ids[:t]], greedy(1, logprobs=5))
        assert again.logprobs[0] == g.logprobs[t], f"after {t} tokens"


@pytest.mark.time_limit(5)
def test_what_can_never_fit_holds_nobody_up():
    engine = fake_engine(num_blocks=4, block_size=B)
    short, long = [1, 2, 3], [1] * 6 * B
    with pytest.raises(ValueError, match=r"prompt 1: needs 7 blocks of 4 tokens .* has 4: raise num_blocks"):
        engine.generate([short, long, short], greedy(2))
    assert engine.queue == [] and engine.stats.requests == 0
    first, error, last = engine.generate([short, long, short], greedy(2), on_error="return")
    assert "needs 7 blocks" in error.error and error.finish_reason == "error" and error.index == 1
    assert first.token_ids == last.token_ids == fake_answer(short, greedy(2), 0)[0] and last.index == 2
    assert engine.stats.steps <= 4
    with pytest.raises(ValueError, match="needs 5 blocks"):
        engine.submit(short, greedy(15))
    assert len(engine.submit(short, greedy(14)).result().token_ids) == 14
    assert_empty(engine)


@pytest.mark.parametrize("limit", [13, 14, 15, 16, 17])
def test_a_length_limit_is_kept_to_the_token(limit):
    engine = fake_engine(block_size=B, max_seq_len=limit)
    for length in (1, limit - 3, limit - 1):
        for output in (limit - length - 1, limit - length, limit - length + 1):
            if output < 1:
                continue
            [g] = engine.generate([[1] * length], greedy(output))
            assert len(g.token_ids) == min(output, limit - length) and g.finish_reason == "length"
        assert len(engine.generate([[1] * length], greedy())[0].token_ids) == limit - length
    for length in (limit, limit + 1):
        with pytest.raises(ValueError, match=f"{length} tokens.*max_seq_len = {limit}"):
            engine.generate([[1] * length], greedy(1))
    assert max(v.num_computed for v in engine.slots) == 0
    assert_empty(engine)


def test_a_pool_that_is_a_limit_is_kept_to_the_token():
    """The pool's capacity, not rounded up: one token more than it has places, since the last needs none."""
    engine = fake_engine(block_size=B, num_blocks=3)
    [g] = engine.generate([[1, 2, 3]], greedy())
    assert len(g.token_ids) == 3 * B + 1 - 3 and g.finish_reason == "length" and g.stats.max_blocks == 3
    [g] = engine.generate([[1] * 3 * B], greedy(1))
    assert len(g.token_ids) == 1
    with pytest.raises(ValueError, match="blocks"):
        engine.generate([[1] * (3 * B + 1)], greedy(1))
    assert_empty(engine)


def test_no_block_leaks_however_requests_end():
    rng = random.Random(4)
    engine = fake_engine(num_slots=5, num_blocks=13, block_size=B)
    handles = []
    for _ in range(500):
        length = rng.choice([1, B - 1, B, B + 1, 2 * B])
        most = rng.choice([1, B - length % B, B, 2 * B + 1])
        handles.append(engine.submit(rng.choices(range(1, 4), k=length), SamplingParams(max_tokens=most)))
        if rng.random() < 0.7:
            engine.step()
        if rng.random() < 0.2:
            rng.choice(handles[-8:]).cancel()
        if rng.random() < 0.05:
            engine.check_integrity()
    results = [h.result() for h in handles]
    assert {g.finish_reason for g in results} == {"stop", "length", "cancelled"}
    assert_empty(engine)
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("error", [RuntimeError("on purpose"), MemoryError(), KeyboardInterrupt()])
def test_an_exception_in_one_step_is_not_the_end(make, step, error):
    engine = make(num_slots=2)
    prompts = [prompt(n) for n in (5, 6, 3)]
    want = [g.token_ids for g in engine.generate(prompts, greedy(6))]
    real, calls = engine._runner.model.forward, 0

    def forward(*args):
        nonlocal calls
        calls += 1
        if calls == step:
            raise error
        return real(*args)

    engine._runner.model.forward = forward
    handles = [engine.submit(p, greedy(6)) for p in prompts]
    for _ in range(step - 1):
        engine.step()
    with pytest.raises(type(error)):
        engine.step()
    assert_empty_but_queue(engine)
    if isinstance(error, Exception):
        for handle in handles[:2]:
            with pytest.raises(RequestError, match=type(error).__name__) as caught:
                handle.result()
            assert caught.value.__cause__ is error
        assert handles[2].result().token_ids == want[2], "it was in the queue"
    else:
        assert [h.result().token_ids for h in handles] == want, "an interrupt ends nobody"
    assert [g.token_ids for g in engine.generate(prompts, greedy(6))] == want
    del engine._runner.model.forward


def assert_empty_but_queue(engine):
    engine.check_integrity()
    assert [v.request_id for v in engine.slots] == [None] * engine.sizes.num_slots
    assert sorted(engine.free_blocks) == list(range(engine.sizes.num_blocks))


def test_a_failing_step_in_generate_leaves_nothing_behind(make):
    engine = make(num_slots=2)
    engine._runner.model.forward = lambda *args: 1 / 0
    with pytest.raises(RequestError, match="prompt 0: ZeroDivisionError"):
        engine.generate([prompt(3)] * 5, greedy(3))
    assert_empty(engine)
    answers = engine.generate([prompt(3)] * 5, greedy(3), on_error="return")
    assert [g.finish_reason for g in answers] == ["error"] * 5 and all("ZeroDivision" in g.error for g in answers)
    del engine._runner.model.forward
    assert len(engine.generate([prompt(3)], greedy(3))[0].token_ids) == 3


def test_interrupting_generate_cancels_what_it_asked_for(make):
    engine = make(num_slots=2)
    other = engine.submit(prompt(4), greedy(8))

    def fn(tokens, logits):
        if len(tokens) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(5), prompt(6), prompt(7)], [greedy(8, logits_fn=fn), greedy(8), greedy(8)])
    assert_empty_but_queue(engine)
    assert engine.stats.cancelled == 3
    assert [q.request_id for q in engine.queue] == [0]
    assert len(other.result().token_ids) == 8


def test_numbers_go_on_from_call_to_call(make):
    engine = make()
    first = engine.generate([prompt(3), prompt(5)], greedy(3))
    second = engine.generate([prompt(5), prompt(3), prompt(4)], greedy(3))
    assert [g.request_id for g in first + second] == list(range(5))
    assert [g.index for g in second] == [0, 1, 2] and len(second) == 3
    assert [second[1].token_ids, second[0].token_ids] == [g.token_ids for g in first]


def test_answers_come_in_the_order_of_the_prompts(make):
    engine = make(num_slots=2)
    answers = engine.generate([prompt(n) for n in (3, 4, 5, 6)], [greedy(n) for n in (30, 1, 20, 2)])
    assert [(g.index, len(g.token_ids), len(g.prompt_token_ids)) for g in answers] == [
        (0, 30, 3),
        (1, 1, 4),
        (2, 20, 5),
        (3, 2, 6),
    ]


def test_a_reader_that_goes_away_frees_its_slot(make):
    engine = make(num_slots=1)
    stream = engine.stream(prompt(5), greedy(100))
    next(stream), next(stream)
    waiting = engine.submit(prompt(3), greedy(2))
    assert [v.request_id for v in engine.slots] == [0]
    del stream
    assert [v.request_id for v in engine.slots] == [None]
    steps = engine.stats.steps
    assert len(waiting.result().token_ids) == 2 and engine.stats.steps - steps <= 3


def test_rows_that_pad_a_step_write_nowhere(make):
    """Three rows, which a graph of four would pad: blocks that nobody owned keep what they held."""
    engine = make(num_slots=4, num_blocks=40, cuda_graphs=True)
    kv = engine._runner.cache.kv
    kv.fill_(7.5)
    handles = [engine.submit(prompt(n), greedy(9)) for n in (3, 5, 6)]
    while not all(h.done for h in handles):
        engine.step()
    assert (kv[:, 20:] == 7.5).all(), "three rows of four blocks took others than the first of the list"
    assert (kv[:, :3] != 7.5).any(1).all()


def test_steps_that_overlap_equal_steps_that_wait(make):
    """Three hundred steps of random shapes, so that a buffer written too early would show."""
    rng = random.Random(7)
    prompts = [prompt(rng.randrange(1, 40), i) for i in range(60)]
    params = [greedy(rng.randrange(1, 40), temperature=rng.choice([0, 1.0]), seed=i) for i in range(60)]
    free, waiting = make(max_step_tokens=32), make(max_step_tokens=32)
    waiting._runner.overlap = False
    assert outcomes(free.generate(prompts, params)) == outcomes(waiting.generate(prompts, params))
    assert free.stats.steps >= 300
