"""The same request gives the same answer, bit for bit, whatever happens around it."""

from __future__ import annotations

import random

import pytest
import torch
from engines import assert_empty, greedy, tiny_engine

from minivllm import ops
from minivllm.request import SamplingParams

LENGTHS = [1, 3, 4, 5, 8, 9, 17, 31, 64, 70, 300]  # beyond 256 keys too: there attention is split


def some_prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(4, 320), k=length)


def some_requests() -> list[tuple[list[int], SamplingParams]]:
    kinds = [
        greedy(9, logprobs=4),
        greedy(9, temperature=1.1, seed=3, logprobs=0, prompt_logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.7, top_p=0.8, top_k=30, seed=2**63, logprobs=1),
        greedy(8, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=-0.2, logprobs=2),
        greedy(7, temperature=1.0, min_p=0.02, n=3, seed=-5, logprobs=1),
        greedy(10, logit_bias={7: 2.5}, min_tokens=3, stop_token_ids=[7, 8, 9], logprobs=1, prompt_logprobs=0),
    ]
    requests = [(some_prompt(n), kinds[i % len(kinds)]) for i, n in enumerate(LENGTHS)]
    # Beginnings in common, and one prompt twice.
    base = some_prompt(23)
    requests += [(base[:n] + some_prompt(4), kinds[i]) for i, n in enumerate((8, 12, 21, 23))]
    return [*requests, (some_prompt(17), kinds[0]), (some_prompt(17), kinds[4])]


REQUESTS = some_requests()


def outcome(g):
    """Return all that must be the same: tokens, text, reasons, and log probabilities to the last bit."""
    samples = [(s.token_ids, s.text, s.finish_reason, s.stop_reason, s.logprobs) for s in g.samples]
    return g.prompt_token_ids, samples, g.prompt_logprobs, g.seed


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def alone(path, device, dtype):
    """Answers of requests that had a new engine each."""
    found = []
    for prompt, params in REQUESTS:
        with tiny_engine(path, device, dtype=dtype, num_slots=1, num_blocks=90) as engine:
            found.append(outcome(engine.generate([prompt], params)[0]))
    return found


SETTINGS = {
    "two slots": {"num_slots": 2},
    "all at once": {"num_slots": 20, "num_blocks": 400},
    "chunks of 7": {"num_slots": 5, "max_step_tokens": 7},
    "chunks of 64": {"num_slots": 5, "max_step_tokens": 64},
    "one token a step": {"num_slots": 3, "max_step_tokens": 1},
    "not cached": {"num_slots": 5, "prefix_caching": False},
    "blocks of 1": {"num_slots": 5, "block_size": 1, "num_blocks": 700},
    "blocks of 13": {"num_slots": 5, "block_size": 13},
    "blocks of 64": {"num_slots": 5, "block_size": 64, "num_blocks": 12},
    "preempted": {"num_slots": 12, "num_blocks": 79},
    "graphs": {"num_slots": 7, "cuda_graphs": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_do_not_depend_on_the_setting(path, device, dtype, alone, setting):
    prompts, params = [list(column) for column in zip(*REQUESTS, strict=True)]
    with tiny_engine(path, device, dtype=dtype, **{"num_blocks": 200, **SETTINGS[setting]}) as engine:
        for order in (range(len(prompts)), range(len(prompts) - 1, -1, -1)):  # the second time many are cached
            answers = engine.generate([prompts[i] for i in order], [params[i] for i in order])
            for i, answer in zip(order, answers, strict=True):
                assert answer.seed == params[i].seed or params[i].seed is None
                assert outcome(answer)[:3] == alone[i][:3], f"request {i}"
            assert_empty(engine)
        if setting == "preempted":
            assert engine.stats.preemptions > 0
        assert (engine.stats.blocks_cached > 0) == (setting != "not cached")


def test_answers_do_not_depend_on_when_others_come(path, device, dtype, alone):
    rng = random.Random(8)
    with tiny_engine(path, device, dtype=dtype, num_slots=4, num_blocks=150, max_step_tokens=50) as engine:
        for _ in range(2):
            left = list(range(len(REQUESTS)))
            rng.shuffle(left)
            handles = {}
            while left:
                i = left.pop()
                handles[i] = engine.submit(*REQUESTS[i])
                for _ in range(rng.randrange(4)):
                    engine.step()
                if rng.random() < 0.3:
                    engine.submit(some_prompt(rng.randrange(1, 90)), greedy(20)).cancel()
            for i, handle in handles.items():
                assert outcome(handle.result())[:3] == alone[i][:3], f"request {i}"
        assert_empty(engine)


def attention_by_batch(q, kv, table, slots, lens, max_seq_len, scale, workspace, out=None, settled=False):
    """Attend in float32, in splits whose length follows from the number of rows: right, but not always the same."""
    split = 3 + 2 * len(slots)
    out = torch.empty_like(q) if out is None else out
    size, heads = kv.shape[3], q.shape[1] // kv.shape[2]
    for row, (slot, length) in enumerate(zip(slots.tolist(), lens.tolist(), strict=True)):
        blocks = table[slot, : -(-length // size)].long()
        keys, values = (
            kv[blocks, i].transpose(1, 2).flatten(0, 1)[:length].float().repeat_interleave(heads, 1) for i in (0, 1)
        )
        scores = torch.einsum("hd,thd->ht", q[row].float(), keys) * scale
        weights = (scores - scores.max(1, keepdim=True).values).exp()
        total = sum(w.sum(1) for w in weights.split(split, 1))
        parts = [
            torch.einsum("ht,thd->hd", w, v) for w, v in zip(weights.split(split, 1), values.split(split), strict=True)
        ]
        out[row] = (sum(parts) / total[:, None]).to(q.dtype)
    return out


def test_a_kernel_that_looks_at_the_batch_is_found(path, monkeypatch):
    """The inverse: with sums whose order follows from the number of rows, the comparison above must fail."""
    prompts = [some_prompt(n) for n in (31, 9, 17, 40)]
    params = greedy(9, logprobs=2)

    def differs() -> bool:
        with tiny_engine(path, num_slots=4) as engine:
            together = [outcome(g)[:3] for g in engine.generate(prompts, params)]
        singly = []
        for prompt in prompts:
            with tiny_engine(path, num_slots=1) as engine:
                singly.append(outcome(engine.generate([prompt], params)[0])[:3])
        tokens = [[s[0] for s in g[1]] for g in together], [[s[0] for s in g[1]] for g in singly]
        assert tokens[0] == tokens[1], "it is right, to within rounding"
        return together != singly

    assert not differs()
    monkeypatch.setattr(ops, "decode_attention", attention_by_batch)
    assert differs()
