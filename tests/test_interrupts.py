"""Ctrl-C at any point: afterwards all slots are free, all blocks back, and what is asked next is answered right."""

from __future__ import annotations

import dis
import gc
import os
import random
import signal
import sys
import time
import weakref
from collections import defaultdict
from pathlib import Path

import pytest
from engines import assert_empty, fake_answer, fake_engine, greedy

import minivllm
from minivllm.engine import BatchEngine
from minivllm.lock import FairLock
from minivllm.request import SamplingParams
from minivllm.runner import Runner

PACKAGE = str(Path(minivllm.__file__).parent)
# Where CPython looks for a signal: as a function begins, after a call, and before it jumps back.
CHECKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}

A, B, C = [1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5]
HOT = greedy(7, temperature=1.0, seed=3, logprobs=1)
TWO = greedy(5, temperature=1.0, seed=4, n=2)
HOST = greedy(4, logits_fn=lambda tokens, logits: None)


class Tracer:
    """Count the places of the package where a signal could be seen, and raise KeyboardInterrupt at one of them."""

    def __init__(self, stop_at: int = -1) -> None:
        self.stop_at = stop_at
        self.count = 0
        self.fired = ""
        self.places: dict[tuple, list[int]] = defaultdict(list)
        self._last: dict[int, int] = {}
        self._ops: dict[object, dict[int, str]] = {}

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.local

    def local(self, frame, event, arg):
        if event != "opcode":
            return self.local
        code, here = frame.f_code, frame.f_lasti
        before = self._last.get(id(frame), 0) if here else None
        self._last[id(frame)] = here
        if before is None:
            return self.local
        if code not in self._ops:
            self._ops[code] = {i.offset: i.opname for i in dis.get_instructions(code)}
        if self._ops[code].get(before) in CHECKS:
            self.count += 1
            self.places[code.co_filename, code.co_qualname, here].append(self.count)
            if self.count == self.stop_at:
                self.fired = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname}"
                raise KeyboardInterrupt
        return self.local

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


def calls(engine):
    """Make one call of every kind."""
    engine.generate([A, B, C], [HOT, TWO, HOST])
    stream = engine.stream([B, A], [greedy(3), HOT])
    next(stream), next(stream)
    stream.close()
    handle = engine.submit(C, HOT)
    engine.step(), engine.step()
    [fork] = handle.fork()
    fork.cancel()
    handle.result()
    assert engine.slots and engine.queue == [] and engine.free_blocks and engine.stats
    engine.check_integrity()


def look_afterwards(engine, earlier):
    assert not engine._lock._owner and not engine._add_lock.locked(), "a lock is still held"
    engine.check_integrity()
    for handle, prompt, params in earlier:  # an interrupt ends nobody else's request, and changes no answer
        answer = handle.result()
        tokens, why = fake_answer(prompt, params, params.seed or 0)
        assert (answer.token_ids, answer.finish_reason) == (tokens, why)
        assert answer.logprobs is None or [next(iter(d)) for d in answer.logprobs] == tokens
    [answer] = engine.generate([B], HOT)
    assert answer.token_ids == fake_answer(B, HOT, 3)[0]
    for _ in range(40):  # a handle that was at hand when the interrupt came goes on
        engine.step()
    assert_empty(engine)
    assert not engine._requests, "something waits for ever"


def run_interrupted(stop_at: int) -> Tracer:
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=9)
    earlier = [(engine.submit(p, q), p, q) for p, q in ((A, HOT), (B, greedy(4)))]
    tracer = Tracer(stop_at)
    try:
        with tracer:
            calls(engine)
    except KeyboardInterrupt:
        assert tracer.fired
    try:
        look_afterwards(engine, earlier)
    except BaseException as error:
        error.add_note(f"interrupted at {tracer.fired}, place {stop_at} of {tracer.count}")
        raise
    return tracer


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older interpreters look for signals elsewhere")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a __del__ goes no further
@pytest.mark.time_limit(300)
def test_an_interrupt_at_any_instruction():
    """Raise KeyboardInterrupt at every place of the package where CPython could deliver one."""
    everything = run_interrupted(-1)
    rng = random.Random(1)
    # Each place in the code the first time it is passed, and another time; a part of them in an ordinary run.
    stops = sorted({n for numbers in everything.places.values() for n in (numbers[0], rng.choice(numbers))})
    assert len(stops) > 1000
    for stop in stops if "EVERY_INTERRUPT" in os.environ else rng.sample(stops, 90):
        run_interrupted(stop)
    # Where the lock is taken and given up: each place, as it is passed first and last.
    locks = [n for (file, name, _), n in everything.places.items() if file.endswith("lock.py") or "_end_canc" in name]
    assert len(locks) > 20
    for stop in {n for numbers in locks for n in (numbers[0], numbers[-1])}:
        run_interrupted(stop)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.time_limit(120)
def test_real_signals_at_random_moments():
    """The same with real signals, from a timer that knows nothing of the engine."""
    rng = random.Random(2)
    want = fake_answer(A, HOT, 3)[0]
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=9)

    armed = False

    def handler(signum, frame):
        if armed:  # a signal that went to another thread may be seen after the timer was stopped
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, handler)
    hits = 0
    try:
        for _ in range(100):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(1e-4, 1.2e-2))
                calls(engine)
                armed = False
            except KeyboardInterrupt:
                armed = False
                hits += 1
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            engine.check_integrity()
            for _ in range(40):  # what was in a caller's hand as the signal came goes on
                engine.step()
            assert_empty(engine)
            assert engine.generate([A], HOT)[0].token_ids == want
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert hits > 10


def test_an_interrupt_while_waiting_for_the_lock():
    """A thread that gives up its place in the line neither keeps the lock nor holds up those behind it."""
    import threading

    lock, held, go = FairLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            go.wait()

    def handler(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    try:
        timer = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
        assert not lock._waiters
    finally:
        signal.signal(signal.SIGUSR1, before)
        go.set()
        other.join()
    assert lock._owner is None and lock.acquire(blocking=False)
    lock.release()


def test_result_can_be_asked_again_after_an_interrupt():
    engine = fake_engine()
    handle = engine.submit(A, SamplingParams(max_tokens=30, ignore_eos=True))
    engine._runner.model.before = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    assert not handle.done and [q.request_id for q in engine.queue] == [0]
    engine._runner.model.before = None
    start = time.perf_counter()
    assert handle.result().token_ids == fake_answer(A, greedy(30), 0)[0]
    assert time.perf_counter() - start < 5


def commit_then_interrupt(monkeypatch):
    commit = BatchEngine._commit

    def interrupted(self, requests):
        commit(self, requests)
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchEngine, "_commit", interrupted)


@pytest.mark.parametrize("name", ["submit", "fork", "load"])
def test_an_interrupted_call_leaves_no_request_that_nobody_reads(name, tmp_path, monkeypatch):
    engine = fake_engine()
    monkeypatch.setattr(engine, "_origin", {"model": "fake", "dtype": "float32"}, raising=False)
    handle = engine.submit(A, HOT)
    engine.step()
    handle.save(tmp_path / "one")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        commit_then_interrupt(patch)
        calls = {"submit": (engine.submit, B), "fork": (handle.fork, 2), "load": (engine.load, tmp_path / "one")}
        call, argument = calls[name]
        call(argument)
    engine.check_integrity()
    assert list(engine._requests.values()) == [handle._request]
    assert handle.result().token_ids == fake_answer(A, HOT, 3)[0]


def test_close_after_an_interrupted_close_gives_the_memory_back(monkeypatch):
    engine = fake_engine()
    kv = weakref.ref(engine._runner.cache.kv)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Runner, "drain", interrupt)
        engine.close()
    engine.close()
    gc.collect()
    assert kv() is None
    engine.close()


def interrupt(*_):
    raise KeyboardInterrupt
