"""Two thousand requests of random kind, some cancelled, some failing: nothing is lost or mixed up."""

from __future__ import annotations

import random

import pytest
from engines import assert_empty, tiny_engine
from tiny import tiny_model

from minivllm.request import RequestError, SamplingParams

REQUESTS = 2000
KINDS = 300  # different requests; each is drawn several times


def some_kind(rng: random.Random, shared: list[list[int]]) -> tuple[list[int], dict]:
    prompt = rng.choice(shared)[: rng.randrange(30)] + rng.choices(range(4, 320), k=rng.randrange(1, 12))
    params: dict = {"max_tokens": rng.choice([1, 2, 3, 5, 8, 13]), "seed": rng.randrange(1 << 40)}
    if rng.random() < 0.5:
        params |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "top_p": rng.choice([1.0, 0.9])}
    if rng.random() < 0.2:
        params |= {"n": rng.choice([2, 3])}
    if rng.random() < 0.2:
        params |= {"logprobs": 1}
    if rng.random() < 0.1:
        params |= {"prompt_logprobs": 1}
    if rng.random() < 0.2:
        params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.5}
    if rng.random() < 0.2:
        params |= {"stop_token_ids": rng.sample(range(320), 60), "min_tokens": 1}
    if rng.random() < 0.1:
        params |= {"stop": ["e", "th"]}
    return prompt, params


def outcome(g):
    samples = [(s.token_ids, s.text, s.finish_reason, s.stop_reason, s.logprobs) for s in g.samples]
    return samples, g.prompt_logprobs


def fail(tokens, logits):
    if len(tokens) % 3 == 0:
        raise ArithmeticError("on purpose")


@pytest.mark.time_limit(240)
def test_two_thousand_requests(tmp_path, device):
    rng = random.Random(5)
    shared = [rng.choices(range(4, 320), k=30) for _ in range(4)]
    path = tiny_model(tmp_path)
    kinds = [some_kind(rng, shared) for _ in range(KINDS)]
    with tiny_engine(path, device, num_slots=1, block_size=8) as engine:
        alone = [outcome(engine.generate([p], SamplingParams(**kind))[0]) for p, kind in kinds]
    drawn = [rng.randrange(KINDS) for _ in range(REQUESTS)]
    failing = set(rng.sample(range(REQUESTS), REQUESTS // 50))
    cancelled = set(rng.sample(range(REQUESTS), REQUESTS // 10))
    with tiny_engine(path, device, num_slots=13, num_blocks=27, max_step_tokens=48, block_size=5) as engine:
        handles, doomed = [], []
        for i, kind in enumerate(drawn):
            prompt, params = kinds[kind]
            params = params | ({"logits_fn": fail, "max_tokens": 13, "stop": ()} if i in failing else {})
            handles.append(engine.submit(prompt, SamplingParams(**params)))
            if i in cancelled:
                doomed.append(handles[-1])
            for _ in range(rng.randrange(3)):
                engine.step()
            if doomed and rng.random() < 0.3:
                doomed.pop(rng.randrange(len(doomed))).cancel()
            if i % 100 == 0:
                engine.check_integrity()
        for handle in doomed:
            handle.cancel()
        survived = 0
        for i, (kind, handle) in enumerate(zip(drawn, handles, strict=True)):
            try:
                answer = handle.result()
            except RequestError as error:
                assert i in failing and "on purpose" in str(error)
                continue
            reasons = {s.finish_reason for s in answer.samples}
            assert "error" not in reasons and (i in cancelled or "cancelled" not in reasons)
            if "cancelled" not in reasons and i not in failing:
                survived += 1
                assert outcome(answer) == alone[kind], f"request {i}"
        assert_empty(engine)
        stats = engine.stats
        print(stats)
        assert survived > 0.85 * REQUESTS and stats.errors > 20 and stats.cancelled > 50
        assert stats.preemptions > 20 and stats.cached_tokens > 1000
