"""Processes that are forks: neither an engine of the parent's nor a new one leaves them waiting for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from engines import assert_empty, fake_engine, greedy

FORK = """
import os, signal, sys, torch
from minivllm import BatchEngine, SamplingParams

path, before, after = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(before)

def answer():
    with BatchEngine(path, device="cpu", num_slots=2) as engine:
        return engine.generate([[5, 6, 7]] * 2, SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids

try:
    BatchEngine(path, device="cpu", num_slots=0)
except ValueError:
    pass
if os.fork() == 0:  # before any engine, but for one that was refused: the first one may be in a child
    signal.alarm(30)
    answer()
    os._exit(0)
assert os.wait()[1] == 0
want = answer()
if os.fork() == 0:
    signal.alarm(30)  # as it hung once
    torch.set_num_threads(after)
    try:
        print(answer() == want)
    except RuntimeError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
assert os.wait()[1] == 0, "the child hung"
assert answer() == want
"""


@pytest.mark.parametrize(("after", "said"), [(2, "'spawn'"), (1, "True")], ids=["threads", "one thread"])
def test_a_new_engine_in_a_forked_process_is_refused_where_it_would_hang(path, after, said):
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(path), "2", str(after)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and done.stdout.count("\n") == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_that_the_engine_is_not_its_own():
    engine = fake_engine()
    read, write = os.pipe()
    assert engine._lock.acquire()  # as another thread may hold it at the fork
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        told = 0
        for call in (lambda: engine.generate([[1]]), engine.step, lambda: engine.slots, engine.close):
            try:
                call()
            except RuntimeError as error:
                told += "spawn" in str(error)
        engine.__del__()
        os.write(write, bytes([told]))
        os._exit(0)
    engine._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 1) == b"\x04"
    os.close(read)
    os.close(write)
    engine.generate([[1]], greedy(2))
    assert_empty(engine)
    engine.close()
