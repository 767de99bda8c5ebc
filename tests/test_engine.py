"""What each public name of the engine promises."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from engines import assert_empty, fake_answer, fake_engine, greedy, tiny_engine
from tiny import tiny_model

from minivllm.engine import BatchEngine
from minivllm.request import (
    Delta,
    EngineClosedError,
    Generation,
    IntegrityError,
    RequestError,
    SamplingParams,
)

P = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15], [16, 17, 18, 19, 20]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(path, device):
    with tiny_engine(path, device) as engine:
        yield engine
        if not engine._closed:
            assert_empty(engine)


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


@pytest.mark.parametrize("prompt", ["hello", [5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7])])
def test_one_prompt_may_stand_alone(engine, prompt):
    [alone] = engine.generate(prompt, greedy(3))
    [listed] = engine.generate([prompt], greedy(3))
    assert alone.token_ids == listed.token_ids and len(alone.token_ids) == 3
    assert alone.prompt == ("hello" if isinstance(prompt, str) else None)
    ids = engine.tokenizer.encode("hello") if isinstance(prompt, str) else [5, 6, 7]
    assert alone.prompt_token_ids == ids


def test_text_and_ids_mix_and_none_is_none(engine):
    answers = engine.generate(["hello", [5, 6]], greedy(2))
    assert [g.prompt for g in answers] == ["hello", None]
    assert engine.generate([], greedy(2)) == []


def test_default_params_run_to_the_limit(path, device):
    with tiny_engine(path, device, max_seq_len=23) as engine:
        [g] = engine.generate([P[0]])
        assert g.finish_reason == "length" and len(g.token_ids) == 20 or g.finish_reason == "stop"
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


@pytest.mark.parametrize("prompts", [None, 7, b"x", {"a": 1}, [None], [[1.5]], [["a"]], [[True]], np.array([1.5, 2.0])])
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
        assert other.stats.prompt_tokens == 1, "one token was computed, the rest came from the file"
        handle.cancel()


def harmed(tensors, metadata):
    """Yield files that are like a saved request, and are none."""
    import json

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


def test_with_closes_also_on_the_way_out_of_an_error(path, device):
    with pytest.raises(KeyError), tiny_engine(path, device) as engine:
        engine.submit(P[0])
        raise KeyError
    assert engine._closed


def test_memory_goes_with_the_engine(path, device):
    """Five in a row, closed or only dropped, leave nothing behind; no cycle keeps an engine until the collector comes."""
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
