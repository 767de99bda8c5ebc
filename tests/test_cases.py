"""Faults that engines of this kind have had, each as a test of its kind, in the engine as a whole."""

from __future__ import annotations

import json
import math
import random
import time

import pytest
import torch
from engines import assert_empty, fake_answer, fake_engine, greedy, tiny_engine
from tiny import tiny_model

from minivllm.request import RequestError, SamplingParams

B = 4  # block size of the engines here
V = 320


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(path, device):
    engines = []

    def make(**sizes):
        engines.append(tiny_engine(path, device, **{"block_size": B, **sizes}))
        return engines[-1]

    yield make
    for engine in engines:
        assert_empty(engine)
        engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * length + seed).choices(range(4, V), k=length)


def outcome(g):
    """Return all of an answer that must not depend on anything else."""
    return g.token_ids, g.text, g.finish_reason, g.stop_reason, g.logprobs, g.prompt_logprobs


def outcomes(answers):
    return [outcome(g) for g in answers]


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


# -------------------------------------------------------------------- requests and sampling


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["ok", ""], [[5], []], ()])
def test_an_empty_prompt_is_an_error_and_nothing_else(make, prompts):
    engine = make()
    if prompts == ():
        assert engine.generate(prompts) == []
        return
    with pytest.raises(ValueError, match="empty"):
        engine.generate(prompts, greedy(2))
    assert engine.queue == [] and engine.stats.requests == 0
    listed = [prompts] if isinstance(prompts, str) else prompts
    answers = engine.generate(prompts, greedy(2), on_error="return")
    assert ["empty" in (g.error or "") for g in answers] == [not p for p in listed]
    assert [len(g.token_ids) for g in answers] == [2 if p else 0 for p in listed]


def test_a_text_that_becomes_no_token_is_empty_too(tmp_path, device):
    from tiny import byte_level_tokenizer, save_tokenizer

    tiny_model(tmp_path, tokenizer=False)
    save_tokenizer(tmp_path, byte_level_tokenizer(add_bos=False))
    with tiny_engine(tmp_path, device) as engine:
        assert len(engine.generate("a", greedy(1))[0].prompt_token_ids) == 1
        with pytest.raises(ValueError, match="empty"):
            engine.generate(["a", ""])


@pytest.mark.parametrize("bad", [V, -1, 2**31, 2**40, -(2**31), 2**70])
def test_an_id_outside_the_vocabulary_is_an_error(make, bad):
    engine = make()
    for ids in ([bad], [5, bad, 6]):
        with pytest.raises(ValueError, match=f"token id {bad} at place {ids.index(bad)} is outside the vocabulary"):
            engine.generate([[5], ids], greedy(1))
    for params in ({"stop_token_ids": [bad]}, {"logit_bias": {bad: 1.0}}):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary"):
            engine.generate([[5]], SamplingParams(**params))
    assert engine.stats.requests == 0
    assert len(engine.generate([[V - 1], [0]], greedy(1))) == 2


def test_too_long_a_prompt_says_so(make):
    engine = make(max_seq_len=30)
    with pytest.raises(ValueError, match=r"31 tokens.*max_seq_len = 30"):
        engine.generate([prompt(31)])
    [g] = engine.generate([prompt(31)], on_error="return")
    assert g.text == "" and "max_seq_len = 30" in g.error and g.finish_reason == "error"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_small_temperatures_become_greedy(path, device, dtype):
    with tiny_engine(path, device, dtype=dtype) as engine:
        [want] = engine.generate([prompt(6)], greedy(12))

        def scale(tokens, logits):
            logits *= 6e4 / logits.abs().max()

        [large] = engine.generate([prompt(6)], greedy(12, logits_fn=scale))
        assert large.token_ids == want.token_ids
        for exponent in range(1, 10):
            hot = greedy(12, temperature=10.0**-exponent, seed=exponent)
            [g] = engine.generate([prompt(6)], greedy(12, temperature=hot.temperature, logits_fn=scale, seed=1))
            assert g.token_ids == want.token_ids, "logits up to 6e4"
            if exponent > 3:
                assert engine.generate([prompt(6)], hot)[0].token_ids == want.token_ids


def test_a_row_of_nan_fails_alone(make):
    def spoil(tokens, logits):
        if len(tokens) == 8:
            logits[17] = math.nan

    def flatten(tokens, logits):
        logits[:] = -math.inf

    engine = make(num_slots=4)
    prompts = [prompt(n) for n in (5, 6, 7, 4)]
    want = engine.generate(prompts, greedy(9))
    params = [greedy(9), greedy(9, logits_fn=spoil), greedy(9), greedy(9, logits_fn=flatten)]
    answers = engine.generate(prompts, params, on_error="return")
    assert outcome(answers[0]) == outcome(want[0]) and outcome(answers[2]) == outcome(want[2])
    assert answers[1].token_ids == want[1].token_ids[:2] and "output token 3 hold NaN" in answers[1].error
    assert answers[3].token_ids == [] and answers[3].finish_reason == "error"


def test_a_model_that_computes_nan_fails_those_requests_alone(path, device):
    with tiny_engine(path, device, num_slots=4) as engine:
        prompts = [[5, 6], [5, 99, 6], [7, 8, 9]]
        banned = greedy(5, logit_bias={99: -100.0})
        want = engine.generate(prompts, banned)
        engine._runner.model.embed[99] = math.nan
        answers = engine.generate(prompts, banned, on_error="return")
        assert [g.finish_reason for g in answers] == ["length", "error", "length"]
        assert [answers[i].token_ids for i in (0, 2)] == [want[i].token_ids for i in (0, 2)]
        assert "NaN" in answers[1].error
        assert_empty(engine)


def test_a_seed_means_the_same_in_any_company(make):
    params = greedy(14, temperature=1.2, top_p=0.9, top_k=40, seed=7, logprobs=1)
    p = prompt(6)
    [want] = outcomes(make(num_slots=1).generate([p], params))
    engine = make(num_slots=8)
    hot = greedy(14, temperature=1.0)
    beside = engine.generate([prompt(n) for n in (3, 4, 5)] + [p] + [prompt(n) for n in (7, 8, 9, 3)], [hot] * 3 + [params] + [hot] * 4)
    assert outcome(beside[3]) == want
    tight = make(num_blocks=9, num_slots=3)
    pressed = tight.generate([prompt(6, 1), prompt(6, 2), p], [hot, hot, params])
    assert outcome(pressed[2]) == want and pressed[2].stats.preemptions > 0
    other = make().generate([p], greedy(14, temperature=1.2, top_p=0.9, top_k=40, seed=8))
    assert other[0].token_ids != want[0]


def test_greedy_answers_do_not_depend_on_the_batch(make):
    params = greedy(10, logprobs=5)
    p = prompt(9)
    [want] = outcomes(make(num_slots=1).generate([p], params))
    engine = make(num_slots=6, prefix_caching=False)
    for company in range(1, 7):
        answers = engine.generate([p] + [prompt(2 + n, n) for n in range(company)], params)
        assert outcome(answers[0]) == want, f"beside {company} others"


# -------------------------------------------------------------------- memory, text


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_pool_held_before_does_not_matter(make, poison):
    clean, dirty = make(), make()
    clean._runner.cache.kv.zero_()
    dirty._runner.cache.kv.fill_(poison)
    prompts = [prompt(n) for n in range(1, 2 * B + 2)]
    assert outcomes(clean.generate(prompts, greedy(B + 1, logprobs=1))) == outcomes(
        dirty.generate(prompts, greedy(B + 1, logprobs=1))
    )


def test_every_end_id_ends(tmp_path, device):
    tiny_model(tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    ends = [1, *range(20, 40)]
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    with tiny_engine(tmp_path, device) as engine:
        for end in (1, 20, 29, 39):
            [g] = engine.generate([prompt(4)], SamplingParams(max_tokens=5, logit_bias={end: 100.0}))
            assert (g.token_ids, g.finish_reason, g.stop_reason) == ([end], "stop", None)
            [g] = engine.generate([prompt(4)], greedy(5, logit_bias={end: 100.0}))
            assert g.token_ids == [end] * 5, "ignored where the caller says so"
            [g] = engine.generate([prompt(4)], SamplingParams(max_tokens=6, min_tokens=3, logit_bias={end: 100.0}))
            assert len(g.token_ids) == 4 and g.token_ids[-1] == end and not set(g.token_ids[:3]) & set(ends)
        [g] = engine.generate([prompt(4)], greedy(5, logit_bias={50: 100.0}, stop_token_ids=[50]))
        assert (g.token_ids, g.finish_reason, g.stop_reason) == ([50], "stop", 50)


def test_no_part_of_a_stop_text_leaks(make):
    """A stop text that spans four tokens: neither an answer nor a stream shows any of it."""
    engine = make()
    word = engine.tokenizer.encode("zqxj")[1:]
    assert len(word) == 4
    tail = engine.tokenizer.encode("after")[1:]

    def writer(script):
        def write(tokens, logits):
            logits[:] = 0
            logits[script[len(tokens) - 5]] = 50

        return write

    before = engine.tokenizer.encode("zq or zqx: ")[1:]
    script = [*before, *word, *tail, *tail]
    params = greedy(len(script), logits_fn=writer(script), stop="zqxj")
    [g] = engine.generate([prompt(5)], params)
    assert (g.text, g.finish_reason, g.stop_reason) == ("zq or zqx: ", "stop", "zqxj")
    assert g.token_ids == [*before, *word]
    pieces = [d.text for d in engine.stream([prompt(5)], params)]
    assert "".join(pieces) == "zq or zqx: " and len(pieces) > 3
    [g] = engine.generate([prompt(5)], greedy(99, logits_fn=writer(script), stop=["zqxj"], include_stop_str_in_output=True))
    assert g.text == "zq or zqx: zqxj"
    [g] = engine.generate([prompt(5)], greedy(len(before), logits_fn=writer(script), stop="zqxj"))
    assert (g.text, g.finish_reason) == ("zq or zqx: ", "length")
    cut = len(before) + 2
    [g] = engine.generate([prompt(5)], greedy(cut, logits_fn=writer(script), stop="zqxj"))
    assert (g.text, g.finish_reason) == ("zq or zqx: zq", "length"), "what was held back comes out at the end"
    late = greedy(len(script), logits_fn=writer(script), stop="zqxj", min_tokens=len(before) + 5)
    assert engine.generate([prompt(5)], late)[0].finish_reason == "length"


def test_a_long_prompt_does_not_stall_the_others(make):
    engine = make(max_step_tokens=16, num_blocks=200, max_seq_len=400)
    talker = engine.submit(prompt(4), greedy(60))
    engine.step()
    long = engine.submit(prompt(300), greedy(1))
    before = engine.slots[0].num_tokens
    steps = 0
    while not long.done:
        engine.step()
        steps += 1
    assert engine.slots[0].num_tokens - before == steps == math.ceil(300 / 15), "a token a step all the while"
    talker.cancel()


@pytest.mark.time_limit(20)
def test_a_thousand_waiting_requests_cost_little():
    engine = fake_engine(num_slots=4)
    start = time.perf_counter()
    answers = engine.generate([[1 + i % 5] for i in range(1000)], greedy(2))
    assert [g.index for g in answers] == list(range(1000))
    assert time.perf_counter() - start < 15
    assert torch.is_inference_mode_enabled() is False, "the engine leaves torch's modes as they were"
    assert_empty(engine)
