"""Faults that engines of this kind have had, each as a test of its kind, of requests, sampling, memory and text."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
from engines import assert_empty, fake_engine, greedy, outcome, outcomes, prompt, tiny_engine
from tiny import tiny_model

from minivllm.request import SamplingParams

B = 4  # block size of the engines here
V = 320


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


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 1e39},
        {"temperature": 10**400},
        {"repetition_penalty": 1e39},
        {"logit_bias": {5: 1e39}},
    ],
)
def test_what_no_float32_holds_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_no_parameter_fails_the_others():
    engine = fake_engine(num_slots=3)
    other = engine.submit([1, 2], greedy(20))
    engine.step()
    huge = [greedy(2, logprobs=20), greedy(min_tokens=2**40), greedy(2**70), greedy(2, logit_bias={5: -(10**400)})]
    for g in engine.generate([[3, 4]] * 4, huge):
        assert g.error is None and g.finish_reason == "length"
    assert other.result().finish_reason == "length"
    assert_empty(engine)


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
    beside = engine.generate(
        [prompt(n) for n in (3, 4, 5)] + [p] + [prompt(n) for n in (7, 8, 9, 3)], [hot] * 3 + [params] + [hot] * 4
    )
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
    [g] = engine.generate(
        [prompt(5)], greedy(99, logits_fn=writer(script), stop=["zqxj"], include_stop_str_in_output=True)
    )
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
    assert engine.slots[0].num_tokens - before == steps, "a token a step all the while"
    assert steps == math.ceil(300 / 15) + engine._runner.overlap, "one more where the host learns late"
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
