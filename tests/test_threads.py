"""One engine, several threads."""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest
from engines import assert_empty, fake_answer, fake_engine, greedy, tiny_engine
from tiny import tiny_model

from minivllm.lock import FairLock
from minivllm.request import EngineClosedError, RequestError, SamplingParams

pytestmark = pytest.mark.time_limit(60)
P = [[1 + (i * j) % 7 for j in range(1, 2 + i)] for i in range(8)]
HOT = greedy(9, temperature=1.0, seed=6)


def in_threads(*functions):
    """Run the functions side by side; raise what one of them raised."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_two_threads_that_generate_get_their_own(tmp_path, device):
    params = greedy(12, temperature=0.8, seed=1, logprobs=2)
    prompts = [[[5 + i, 9, 40 + i] for i in range(6)], [[200 - i, 7] for i in range(9)]]
    with tiny_engine(tiny_model(tmp_path), device, num_slots=4) as engine:
        want = [engine.generate(p, params) for p in prompts]
        got = [None, None]

        def ask(i):
            for _ in range(4):
                got[i] = engine.generate(prompts[i], params)

        in_threads(lambda: ask(0), lambda: ask(1))
        for g, w in zip(got, want, strict=True):
            assert [(x.index, x.token_ids, x.text, x.logprobs) for x in g] == [
                (x.index, x.token_ids, x.text, x.logprobs) for x in w
            ]
        assert_empty(engine)


def test_eight_threads_of_every_kind():
    engine = fake_engine(num_slots=3, block_size=2, num_blocks=17)
    want = [fake_answer(p, HOT, 6)[0] for p in P]

    def generating(seed):
        rng = random.Random(seed)
        for _ in range(12):
            picked = rng.sample(range(8), 3)
            assert [g.token_ids for g in engine.generate([P[i] for i in picked], HOT)] == [want[i] for i in picked]

    def streaming(seed):
        rng = random.Random(seed)
        for _ in range(12):
            i = rng.randrange(8)
            seen = []
            stream = engine.stream(P[i], HOT)
            for delta in stream:
                seen += delta.token_ids
                if rng.random() < 0.1:
                    break
            stream.close()
            assert seen == want[i][: len(seen)]

    def cancelling(seed):
        rng = random.Random(seed)
        for _ in range(25):
            i = rng.randrange(8)
            handle = engine.submit(P[i], HOT)
            time.sleep(rng.random() * 0.003)
            handle.cancel()
            answer = handle.result()
            assert answer.token_ids == want[i][: len(answer.token_ids)]

    def looking():
        for _ in range(60):
            assert len(engine.slots) == 3 and engine.block_table.shape[0] == 3
            free = engine.free_blocks
            assert len(set(free)) == len(free)
            assert engine.stats.blocks_total == 17 and engine.queue is not None and repr(engine)
            engine.check_integrity()

    in_threads(
        *(lambda s=s: generating(s) for s in range(2)),
        *(lambda s=s: streaming(s) for s in range(2)),
        *(lambda s=s: cancelling(s) for s in range(3)),
        looking,
    )
    assert_empty(engine)


def test_submitting_while_another_thread_steps():
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=17)
    stop = threading.Event()
    ended = []

    def server():
        while not stop.is_set() or engine.queue or engine.stats.running:
            ended.extend(engine.step())

    handles = {}

    def client(number):
        for i in range(20):
            handles[number, i] = engine.submit(P[(number + i) % 8], HOT)

    thread = threading.Thread(target=server, daemon=True)
    thread.start()
    in_threads(*(lambda n=n: client(n) for n in range(4)))
    stop.set()
    thread.join(30)
    assert not thread.is_alive() and all(h.done for h in handles.values())
    assert sorted(g.request_id for g in ended) == list(range(80)), "each once, none lost"
    for (number, i), handle in handles.items():
        assert handle.result().token_ids == fake_answer(P[(number + i) % 8], HOT, 6)[0]
    assert_empty(engine)


def test_cancel_during_a_step_holds_when_the_step_ends():
    """Cancel neither waits for a step that is on, nor gets lost when that step was the last."""
    engine = fake_engine()
    inside, go = threading.Event(), threading.Event()

    def before():
        inside.set()
        assert go.wait(10)

    handle = engine.submit(P[3], HOT)
    engine._runner.model.before = before
    thread = threading.Thread(target=engine.step, daemon=True)
    thread.start()
    assert inside.wait(10)
    start = time.perf_counter()
    handle.cancel()
    assert time.perf_counter() - start < 1 and not handle.done
    go.set()
    thread.join(10)
    assert handle.done and handle.result().finish_reason == "cancelled"
    assert_empty(engine)


def test_cancel_while_another_thread_only_looks():
    engine = fake_engine()
    handle = engine.submit(P[3], HOT)
    engine.step()
    held, go = threading.Event(), threading.Event()

    def hold():
        with engine._lock:
            held.set()
            assert go.wait(10)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(10)
    threading.Timer(0.05, go.set).start()
    handle.cancel()
    assert handle.done
    thread.join(10)
    assert_empty(engine)


def test_a_stream_that_the_collector_finds_never_waits():
    """A dropped stream in a cycle can be found at any time, also while this very thread is inside the lock."""
    engine = fake_engine()
    stream = engine.stream([P[3]], HOT)
    next(stream)
    stream.me = stream  # a cycle
    gc.collect()
    ours = engine._lock
    with ours._mutex:
        del stream
        gc.collect()
    assert engine._cancelled
    engine.step()
    assert engine.stats.cancelled == 1
    assert_empty(engine)


def test_a_stream_dropped_in_another_thread():
    engine = fake_engine(num_slots=2)
    handle = engine.submit(P[2], greedy(40))

    def drop():
        for _ in range(10):
            stream = engine.stream([P[3]], greedy(40))
            next(stream)
            del stream

    in_threads(drop, handle.result)
    assert engine.stats.cancelled == 10
    assert_empty(engine)


def test_a_logits_fn_cannot_drive_its_own_engine():
    engine = fake_engine()

    def nested(tokens, logits):
        assert engine.slots and engine.stats
        engine.generate([P[0]], HOT)

    with pytest.raises(RequestError, match="inside one of its own steps"):
        engine.generate([P[1]], greedy(3, logits_fn=nested))
    assert_empty(engine)

    def cancelling(tokens, logits):
        handles[0].cancel()
        handles[1].cancel()

    handles = [engine.submit(P[1], greedy(9, logits_fn=cancelling))]
    handles.append(engine.submit(P[2], greedy(9)))
    engine.step()
    assert [h.result().finish_reason for h in handles] == ["cancelled"] * 2
    assert_empty(engine)


def test_a_failing_step_tells_each_thread_of_its_own():
    """The step of one thread fails: whoever had a request in a slot gets the error, the others their answers."""
    engine = fake_engine(num_slots=2)
    calls = 0

    def before():
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("on purpose")

    engine._runner.model.before = before
    failed, right = [], []

    def ask(i):
        try:
            answer = engine.submit(P[i], HOT).result()
            assert answer.token_ids == fake_answer(P[i], HOT, 6)[0]
            right.append(i)
        except RequestError as error:
            assert "on purpose" in str(error)
            failed.append(i)

    in_threads(*(lambda i=i: ask(i) for i in range(5)))
    assert 1 <= len(failed) <= 2 and len(right) == 5 - len(failed)
    assert_empty(engine)


def test_closing_while_others_wait():
    engine = fake_engine(num_slots=1, num_blocks=40, max_seq_len=150)
    outcomes = []

    def ask():
        try:
            outcomes.append(engine.submit([1, 2], SamplingParams(ignore_eos=True)).result().finish_reason)
        except EngineClosedError:
            outcomes.append("closed")

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    in_threads(engine.close, engine.close)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(outcomes) == 4 and set(outcomes) <= {"closed", "cancelled", "length"}
    assert "closed" in repr(engine)


def test_the_lock_serves_in_the_order_of_coming():
    lock, order, threads = FairLock(), [], []
    with lock, lock:
        for i in range(6):
            thread = threading.Thread(target=lambda i=i: [lock.acquire(), order.append(i), lock.release()], daemon=True)
            thread.start()
            threads.append(thread)
            while len(lock._waiters) <= i:
                time.sleep(0.001)
        got = []
        other = threading.Thread(target=lambda: got.append(lock.acquire(blocking=False)))
        other.start()
        other.join(5)
        assert got == [False]
    for thread in threads:
        thread.join(5)
    assert order == list(range(6)) and lock._owner is None and lock._depth == 0
