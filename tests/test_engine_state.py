"""What forks, saved requests and views promise."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from engines import assert_empty, fake_engine, greedy, tiny_engine
from tiny import tiny_model

from minivllm import saving
from minivllm.request import (
    IntegrityError,
)

P = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15], [16, 17, 18, 19, 20]]


# -------------------------------------------------------------------- fork, save, load


def test_forks_go_on_from_here(engine):
    params = greedy(24, temperature=1.0, seed=9)
    [alone] = engine.generate(P[1], params)
    handle = engine.submit(P[1], params)
    while handle._request.sequences[0].num_output < 10:
        engine.step()
    branches = handle.fork(2)
    tokens = [h.result().token_ids for h in (handle, *branches)]
    begun = handle._request.sequences[0].num_output and 10
    assert tokens[0] == alone.token_ids, "a fork changes nothing for what it comes from"
    assert tokens[1][:begun] == tokens[2][:begun] == alone.token_ids[:begun]
    assert len({tuple(t) for t in tokens}) == 3, "they part ways"
    assert branches[0].result().stats.cached_tokens >= 16, "full blocks are shared"
    assert branches[0].result().seed == 9


def test_greedy_forks_are_equal_and_forks_of_forks_differ(engine):
    handle = engine.submit(P[0], greedy(12))
    engine.step()
    [branch] = handle.fork()
    assert branch.result().token_ids == handle.result().token_ids
    handle = engine.submit(P[0], greedy(12, temperature=1.0, seed=1))
    engine.step()
    [a] = handle.fork()
    [b] = a.fork()
    assert len({tuple(h.result().token_ids) for h in (handle, a, b)}) == 3


def test_a_fork_of_a_loaded_branch_is_a_sample_of_its_own(engine, tmp_path):
    handle = engine.submit(P[0], greedy(12, temperature=1.0, seed=1))
    engine.step()
    [branch] = handle.fork()
    engine.step()
    branch.save(tmp_path / "branch")
    loaded = engine.load(tmp_path / "branch")
    [fork] = loaded.fork()
    assert loaded.result().token_ids == branch.result().token_ids != fork.result().token_ids
    assert [h._request.sequences[0].sample for h in (handle, branch, loaded, fork)] == [0, 1, 1, 2]


def test_what_cannot_be_forked_or_saved_harms_nobody(engine, tmp_path):
    [want] = engine.generate(P[1], greedy(9))
    other = engine.submit(P[1], greedy(9))
    several = engine.submit(P[0], greedy(9, n=2))
    host = engine.submit(P[0], greedy(9, logits_fn=lambda tokens, logits: None))
    engine.step(), engine.step()
    for k in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="k must be"):
            other.fork(k)
    with pytest.raises(ValueError, match="n = 2"):
        several.save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="logits_fn"):
        host.save(tmp_path / "x.safetensors")
    with pytest.raises(OSError):
        other.save(tmp_path / "nowhere" / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
    assert [g.finish_reason for g in (other.result(), several.result(), host.result())] == ["length"] * 3
    assert other.result().token_ids == want.token_ids
    for call in (other.fork, lambda: other.save(tmp_path / "x.safetensors")):
        with pytest.raises(ValueError, match="has ended"):
            call()


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
@pytest.mark.parametrize("chunk", [3, 512])
def test_a_saved_request_goes_on_elsewhere(path, device, tmp_path, steps, chunk):
    params = greedy(15, temperature=0.8, seed=4, logprobs=2, presence_penalty=0.5, logit_bias={9: 1.0})
    with tiny_engine(path, device, max_step_tokens=chunk) as engine:
        [want] = engine.generate(P[1], params)
        handle = engine.submit(P[1], params)
        for _ in range(steps):
            engine.step()
        handle.save(tmp_path / "one.safetensors")
        assert handle.result().token_ids == want.token_ids, "it goes on here too"
    with tiny_engine(path, device, block_size=3, seed=99) as other:
        loaded = other.load(tmp_path / "one.safetensors").result()
        assert_empty(other)
    assert loaded.token_ids == want.token_ids and loaded.logprobs == want.logprobs
    assert (loaded.seed, loaded.text, loaded.prompt_token_ids) == (4, want.text, P[1])


def test_load_uses_the_kv_of_the_file(path, device, tmp_path):
    with tiny_engine(path, device) as engine:
        handle = engine.submit(P[1], greedy(9))
        for _ in range(5):
            engine.step()
        handle.save(tmp_path / "one.safetensors")
        handle.cancel()
    with tiny_engine(path, device) as other:
        handle = other.load(tmp_path / "one.safetensors")
        other.step()
        assert other.slots[0].phase == "decode"
        assert other.stats.prompt_tokens == 0, "only the answer's last token was computed, the rest came from the file"
        handle.cancel()


def saved_by(path, file, **options):
    """Save a request of an engine on the model at ``path``, after four steps or, with ``steps``, as many."""
    steps = options.pop("steps", 4)
    with tiny_engine(path, **options) as engine:
        handle = engine.submit(P[1], greedy(9))
        for _ in range(steps):
            engine.step()
        handle.save(file)
        return handle.result()


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("change", ["all", "one weight", "config", "dtype"])
def test_a_request_of_another_model_is_refused(path, tmp_path, change, steps):
    from safetensors.torch import load_file, save_file

    other, options = tmp_path / "other", {}
    shutil.copytree(path, other)
    if change == "all":
        tiny_model(other, seed=5)
    elif change == "one weight":  # as tuning of some layers would leave it: the embedding and the norms are the same
        weights = load_file(other / "model.safetensors")
        weights["model.layers.1.self_attn.v_proj.weight"] *= 1.01
        save_file(weights, other / "model.safetensors")
    elif change == "config":
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25}))
    else:
        options["dtype"] = "bfloat16"
    saved_by(path, tmp_path / "one", steps=steps)
    with tiny_engine(other, **options) as engine:
        words = "dtype float32, and this one has bfloat16" if change == "dtype" else "another model"
        with pytest.raises(ValueError, match=words) as refused:
            engine.load(tmp_path / "one")
        assert str(tmp_path / "one") in str(refused.value)
        assert_empty(engine)


def test_a_copy_of_the_model_in_shards_takes_a_request(path, tmp_path):
    """What makes no difference to the answers: where the files are, how they are cut, what the config says of ends."""
    from transformers import AutoModelForCausalLM

    other = tmp_path / "other"
    shutil.copytree(path, other)
    (other / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(path, dtype="auto").save_pretrained(other, max_shard_size="100KB")
    assert len(list(other.glob("*.safetensors"))) > 1
    config = json.loads((path / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": [3, 5], "max_position_embeddings": 300}))
    want = saved_by(path, tmp_path / "one")
    with tiny_engine(other) as engine:
        assert engine.load(tmp_path / "one").result().token_ids == want.token_ids


def test_the_fingerprint_is_made_when_first_needed_and_once(path, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(saving, "fingerprint", lambda *args: calls.append(args) or "f" * 64)
    with tiny_engine(path) as engine:
        handle = engine.submit(P[1], greedy(9))
        engine.step(), engine.step()
        assert calls == []
        handle.save(tmp_path / "one"), handle.save(tmp_path / "two")
        assert engine.load(tmp_path / "one").result().token_ids == handle.result().token_ids
    assert len(calls) == 1


def harmed(tensors, metadata):
    """Yield files that are like a saved request, and are none."""
    state = json.loads(metadata["request"])
    yield {**tensors, "kv": tensors["kv"][:1]}, metadata
    yield {**tensors, "kv": tensors["kv"].double()}, metadata
    yield {**tensors, "kv": tensors["kv"].repeat(1, 1, 1, 9, 1)}, metadata
    yield {**tensors, "kv": tensors["kv"][:, :, :, :0]}, metadata
    yield {**tensors, "kv": tensors["kv"][0]}, metadata
    yield {"kv": tensors["kv"]}, metadata
    yield {**tensors, "tokens": tensors["tokens"] + 100_000}, metadata
    yield {**tensors, "tokens": torch.cat([tensors["tokens"][:-1], torch.tensor([-5], dtype=torch.int32)])}, metadata
    yield {**tensors, "tokens": tensors["tokens"].repeat(200)}, metadata
    yield tensors, {**metadata, "format": "other"}
    yield tensors, {**metadata, "request": "{}"}
    yield tensors, {**metadata, "request": "no json"}
    yield tensors, {**metadata, "request": json.dumps({**state, "prompt_tokens": 0})}
    yield tensors, {**metadata, "request": json.dumps({**state, "params": {"top_p": 7}})}
    yield tensors, {**metadata, "request": json.dumps({**state, "params": {"unknown": 7}})}


def test_a_file_that_does_not_fit_is_refused(engine, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = tmp_path / "one.safetensors"
    handle = engine.submit(P[1], greedy(9))
    for _ in range(4):
        engine.step()
    handle.save(file)
    with safe_open(file, framework="pt") as opened:
        tensors, metadata = {k: opened.get_tensor(k) for k in opened.keys()}, opened.metadata()  # noqa: SIM118
    for i, (bad, words) in enumerate(harmed(tensors, metadata)):
        save_file({k: v.contiguous() for k, v in bad.items()}, file, metadata=words)
        with pytest.raises(ValueError):
            engine.load(file)
            print(f"file {i} was taken")
    file.write_bytes(b"no file of that kind")
    with pytest.raises(ValueError, match="not a saved request"):
        engine.load(file)
    with pytest.raises(FileNotFoundError):
        engine.load(tmp_path / "none")
    assert len(handle.result().token_ids) == 9


# -------------------------------------------------------------------- views, stats, integrity


def test_views_are_snapshots_that_show_well(engine):
    engine.submit(P[1], greedy(5)), engine.submit(P[0], greedy(5))
    engine.step()
    engine.submit(P[2], greedy(5)), engine.submit(P[2], greedy(5))
    slots, queue, free, table = engine.slots, engine.queue, engine.free_blocks, engine.block_table
    first = slots[0]
    assert (first.request_id, first.sample, first.prompt_tokens, first.blocks) == (0, 0, 7, (0, 1))
    assert [v.request_id for v in slots] == [0, 1, None] and slots[2].phase == "free"
    assert [q.request_id for q in queue] == [2, 3]
    assert table.dtype == np.int32 and table.shape[0] == 3 and table[0, :3].tolist() == [0, 1, -1]
    assert len(free) == 60 - 3 and 0 not in free
    kept = (table.copy(), list(free))
    engine.step(), engine.step()
    assert (table == kept[0]).all() and free == kept[1], "a snapshot changed"
    table[:] = 7
    free.clear()
    assert engine.block_table.max() < 60 and engine.free_blocks
    for view in (first, queue[0], engine.stats):
        with pytest.raises(dataclasses.FrozenInstanceError):
            view.request_id = 1
    assert "request_id=0" in repr(first) and "slots" in repr(engine)
    for _ in range(12):
        engine.step()


def test_stats_count(engine):
    engine.generate(P, [greedy(3)] * 3 + [greedy(2, stop_token_ids=list(range(320)))])
    s = engine.stats
    assert (s.requests, s.length, s.stopped, s.cancelled, s.errors) == (4, 3, 1, 0, 0)
    assert s.generated_tokens == 10 and s.prompt_tokens == sum(map(len, P))
    assert (s.running, s.queued, s.blocks_total) == (0, 0, 60)
    assert s.blocks_free + s.blocks_cached == 60
    [g] = engine.generate(P[1], greedy(3))
    assert g.stats.cached_tokens == 4 and engine.stats.cached_tokens == 4
    assert 0 < g.stats.ttft <= g.stats.total_time and g.stats.max_blocks == 3


def test_stats_count_a_prompt_once_however_often_it_is_computed():
    engine = fake_engine(num_slots=3, num_blocks=7, max_step_tokens=5)
    prompts = [[1 + i, *range(2, 12)] for i in range(3)]
    handles = [engine.submit(p, greedy(9)) for p in prompts]
    answers = [h.result() for h in handles]
    assert engine.stats.preemptions > 0
    assert engine.stats.prompt_tokens == 33 and engine.stats.cached_tokens == 0
    assert [g.stats.cached_tokens for g in answers] == [0, 0, 0], "what it computed itself before it was sent back"
    engine.generate(prompts[-1], greedy(1))
    assert engine.stats.prompt_tokens + engine.stats.cached_tokens == 44


@pytest.mark.parametrize(
    "harm",
    [
        lambda s: s.pool.free.pop(),
        lambda s: s.pool.free.append(s.pool.free[0]),
        lambda s: s.table.__setitem__((0, 1), s.table[0, 0]),
        lambda s: s.table.__setitem__((0, 5), 3),
        lambda s: s.table.__setitem__((2, 0), 3),
        lambda s: s.free_slots.append(0),
        lambda s: s.free_slots.clear(),
        lambda s: s.queue.append(s.slots[0]),
        lambda s: s.queue.append(s.queue[0]),
        lambda s: s.queue.clear(),
        lambda s: s.slots.__setitem__(2, s.slots[0]),
        lambda s: s.pool.refs.__setitem__(0, 2),
        lambda s: s.length.__setitem__(0, 40),
        lambda s: setattr(s.slots[0], "state", "ended"),
        lambda s: setattr(s.slots[0], "slot", 1),
    ],
)
def test_check_integrity_sees_every_kind_of_harm(harm):
    engine = fake_engine(num_slots=3)
    engine.submit([1, 2, 3, 4, 5, 6], greedy(9)), engine.submit([1, 2, 3], greedy(9))
    engine.step()
    for _ in range(3):
        engine.submit([4], greedy(9))
    engine.check_integrity()
    engine._take_inbox()
    harm(engine._scheduler)
    with pytest.raises(IntegrityError):
        engine.check_integrity()
    with pytest.raises(IntegrityError):
        engine.check_integrity()
