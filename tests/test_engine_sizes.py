"""What an engine takes, what it gives back, and what its arguments may be."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from engines import assert_empty, fake_answer, fake_engine, greedy, tiny_engine

from minivllm.config import ModelConfig
from minivllm.defaults import choose_sizes
from minivllm.engine import BatchEngine
from minivllm.request import (
    EngineClosedError,
)

P = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15], [16, 17, 18, 19, 20]]


# -------------------------------------------------------------------- close


def test_close_ends_everything(path, device):
    engine = tiny_engine(path, device)
    handles = [engine.submit(p, greedy(30)) for p in P[:2]]
    stream = engine.stream(P[2], greedy(30))
    next(stream)
    handles += [engine.submit(p, greedy(30)) for p in P[2:]]
    engine.close()
    engine.close()
    assert [h.result().finish_reason for h in handles] == ["cancelled"] * 4
    assert "closed" in repr(engine)
    assert [v.request_id for v in engine.slots] == [None] * 3 and len(engine.free_blocks) == 60
    calls = [
        lambda: engine.generate(P),
        lambda: engine.submit(P[0]),
        lambda: engine.stream(P),
        lambda: engine.step(),
        lambda: engine.load("x"),
        lambda: engine.check_integrity(),
        lambda: handles[0].fork(),
    ]
    for call in calls:
        with pytest.raises(EngineClosedError):
            call()
    handles[0].cancel()
    stream.close()


def test_what_there_was_can_be_read_after_the_close(path, device):
    with tiny_engine(path, device) as engine:
        [want] = engine.generate(P[1], greedy(6))
        ended, cut, begun = (engine.submit(P[1], greedy(n)) for n in (6, 40, 40))
        assert ended.result().text == want.text
        reader = iter(begun)
        first = next(reader)
    assert [d.token_ids for d in ended] == [want.token_ids]
    assert "".join(d.text for d in ended) == want.text
    for deltas in (list(cut), [first, *reader]):
        assert deltas[-1].finish_reason == "cancelled"
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens[: len(want.token_ids)] == want.token_ids[: len(tokens)] != []


@pytest.mark.parametrize("read", [lambda handle: list(handle)[-1], lambda handle: handle.result()])
def test_a_thread_that_waits_while_another_closes_comes_to_the_end(read):
    engine, reasons = fake_engine(), []
    handle = engine.submit([1, 2], greedy(9))
    thread = threading.Thread(target=lambda: reasons.append(read(handle).finish_reason))
    with engine._lock:
        thread.start()
        while not engine._lock._waiters:
            time.sleep(0.001)
        engine.close()
    thread.join(30)
    assert reasons == ["cancelled"]


def test_with_closes_also_on_the_way_out_of_an_error(path, device):
    with pytest.raises(KeyError), tiny_engine(path, device) as engine:
        engine.submit(P[0])
        raise KeyError
    assert engine._closed


def test_memory_goes_with_the_engine(path, device):
    """Five in a row, closed or dropped, leave nothing behind, and none waits for the collector."""
    gc.collect()
    gc.disable()
    try:
        for i in range(5):
            engine = tiny_engine(path, device, num_slots=2)
            engine.generate(P, greedy(2, logprobs=1))
            with pytest.raises(ValueError):
                engine.generate([[]])
            list(engine.stream(P[0], greedy(2)))
            kv = weakref.ref(engine._runner.cache.kv)
            weight = weakref.ref(engine._runner.model.embed)
            if i % 2:
                engine.close()
            gone = weakref.ref(engine)
            del engine
            assert kv() is None and weight() is None and gone() is None
    finally:
        gc.enable()


def test_two_engines_side_by_side(path, device):
    with tiny_engine(path, device) as a, tiny_engine(path, device, block_size=5) as b:
        one, two = a.stream(P[1], greedy(8)), b.stream(P[1], greedy(8))
        pairs = list(zip(one, two, strict=True))
        assert [x.token_ids for x, _ in pairs] == [y.token_ids for _, y in pairs]
        assert a.stats.requests == b.stats.requests == 1


# -------------------------------------------------------------------- the constructor


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"num_slots": 0}, ValueError),
        ({"num_slots": 1.5}, TypeError),
        ({"num_slots": True}, TypeError),
        ({"block_size": 0}, ValueError),
        ({"num_blocks": 0}, ValueError),
        ({"num_blocks": None, "kv_cache_bytes": 10}, ValueError),
        ({"kv_cache_bytes": 10_000}, ValueError),
        ({"max_seq_len": 1}, ValueError),
        ({"max_seq_len": 100_000}, ValueError),
        ({"max_step_tokens": 0}, ValueError),
        ({"device": "tpu"}, (ValueError, RuntimeError)),
        ({"dtype": "int8"}, (ValueError, TypeError)),
        ({"unknown": 1}, TypeError),
    ],
)
def test_what_cannot_be_is_refused(path, bad, error):
    with pytest.raises(error):
        tiny_engine(path, **bad)


@pytest.mark.parametrize(
    ("head_dim", "place", "dtype", "served"),
    [
        (64, "cuda", torch.bfloat16, True),
        (256, "cuda", torch.bfloat16, False),
        (256, "cuda", torch.float32, True),
        (256, "cpu", torch.bfloat16, True),
        (20, "cpu", torch.float32, False),
    ],
)
def test_a_head_without_a_kernel_is_refused_before_the_weights(path, head_dim, place, dtype, served):
    config = replace(ModelConfig.from_dir(path), head_dim=head_dim)
    names = ("num_slots", "block_size", "num_blocks", "kv_cache_bytes", "max_seq_len", "max_step_tokens")
    sizes = {**dict.fromkeys(names), "num_blocks": 4}
    if served:
        assert choose_sizes(config, torch.device(place), dtype, **sizes).num_blocks == 4
    else:
        with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
            choose_sizes(config, torch.device(place), dtype, **sizes)


def test_kv_cache_bytes_is_an_absolute_size(path):
    block = 4 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, head_dim, bytes
    with tiny_engine(path, num_blocks=None, kv_cache_bytes=7 * block + block // 2) as engine:
        assert engine.stats.blocks_total == 7
        assert engine._runner.cache.kv.numel() * 4 == 7 * block


def test_seeds_come_from_the_engine_and_the_ordinal(path):
    with tiny_engine(path, seed=5) as a, tiny_engine(path, seed=5) as b, tiny_engine(path, seed=6) as c:
        hot = greedy(8, temperature=1.5)
        one = a.generate(P, hot)
        two = [b.generate(p, hot)[0] for p in P]
        assert [g.token_ids for g in one] == [g.token_ids for g in two]
        assert len({g.seed for g in one}) == 4
        assert [g.token_ids for g in c.generate(P, hot)] != [g.token_ids for g in one]
        again = a.generate(P[2], greedy(8, temperature=1.5, seed=one[2].seed))[0]
        assert again.token_ids == one[2].token_ids, "any answer can be made again from its seed"


def test_n_samples_share_the_prompt():
    engine = fake_engine(num_slots=4, block_size=2)
    [g] = engine.generate([[1, 2, 3, 4, 5]], greedy(6, n=3, temperature=1.0, seed=2))
    assert [s.sample for s in g.samples] == [0, 1, 2]
    assert [s.token_ids for s in g.samples] == [
        fake_answer([1, 2, 3, 4, 5], greedy(6, temperature=1.0), 2, sample)[0] for sample in range(3)
    ]
    assert g.token_ids == g.samples[0].token_ids and len({tuple(s.token_ids) for s in g.samples}) == 3
    assert engine.stats.cached_tokens == 8 and engine.stats.prompt_tokens == 7
    assert_empty(engine)


def test_engine_has_every_name_of_the_contract():
    names = "generate chat stream submit load step slots queue free_blocks block_table stats check_integrity close"
    assert all(hasattr(BatchEngine, name) for name in names.split())
    assert hasattr(fake_engine(), "timeline")
