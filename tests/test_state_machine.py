"""Drive the engine through everything that can happen to it, in any order, beside a dictionary that knows better.

The forward is a pure function of the tokens that it reads back through the block table, so what the engine should have
answered is known without an engine. After every rule all stores are compared with the dictionary.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest
from dictionary import Dictionary, Entry
from engines import FAKE_VOCAB, assert_empty, fake_answer, fake_engine
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from minivllm.request import RequestError, SamplingParams

SEED = int(os.environ.get("STATE_MACHINE_SEED", "20"))
EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "540"))
MAX_SEQ_LEN = 40
WHERE = [
    "_runner.model.forward",
    "_runner.launch",
    "_runner.collect",
    "_scheduler.admit",
    "_scheduler.plan",
    "_scheduler.apply",
    "_scheduler.release",
    "_scheduler.preempt",
    "_scheduler.take_slot",
    "_scheduler.append_blocks",
    "_scheduler.grow",
    "_scheduler.register",
    "_scheduler.pool.allocate",
    "_scheduler.pool.take",
    "_scheduler.pool.release",
    "_scheduler.pool.share",
    "_take_inbox",
    "_collect",
    "_look",
    "_end",
]


def failing_fn(prompt_len: int, fails_at: int):
    def fn(token_ids, logits):
        if len(token_ids) - prompt_len == fails_at:
            raise ValueError("on purpose")

    return fn


def progress(stats) -> int:
    """Count what a step can bring: something computed, or something ended."""
    return stats.steps + stats.length + stats.stopped + stats.cancelled + stats.errors


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=9)
PICK = st.integers(0, 10**6)
PARAMS = {
    "max_tokens": st.sampled_from([None, 1, 2, 3, 5, 9]),
    "n": st.sampled_from([1, 1, 1, 2, 3]),
    "temperature": st.sampled_from([0.0, 0.0, 1.0]),
    "seed": st.integers(0, 2),
    "logprobs": st.sampled_from([None, None, 1]),
    "ignore_eos": st.booleans(),
}


class EngineMachine(Dictionary, RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 16]),
        num_blocks=st.integers(1, 8),
        num_slots=st.integers(1, 3),
        caching=st.booleans(),
        budget=st.sampled_from([1, 3, 7, 512]),
        overlap=st.booleans(),
    )
    def start(self, block_size, num_blocks, num_slots, caching, budget, overlap):
        self.overlap = overlap  # as on a GPU, where step t + 1 is launched before step t is collected
        self.sizes = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "num_slots": num_slots,
            "prefix_caching": caching,
            "max_step_tokens": budget,
            "max_seq_len": MAX_SEQ_LEN,
        }
        self.directory = tempfile.TemporaryDirectory()
        self.answers: dict[tuple, tuple[list[int], str]] = {}
        self.open()

    def open(self):
        self.engine = fake_engine(**self.sizes)
        self.engine._runner.overlap = self.overlap
        self.entries: list[Entry] = []
        self.capacity = self.sizes["block_size"] * self.sizes["num_blocks"] + 1

    # ---------------------------------------------------------------- rules

    @rule(prompt=PROMPTS, fails_at=st.sampled_from([None, None, None, 0, 1, 3]), **PARAMS)
    def add(self, prompt, fails_at, **params):
        fn = None if fails_at is None else failing_fn(len(prompt), fails_at)
        params = SamplingParams(**params, logits_fn=fn)
        needs = len(prompt) + (params.max_tokens or 1)
        try:
            handle = self.engine.submit(prompt, params)
        except ValueError as error:
            assert needs > self.capacity, error
            assert "blocks" in str(error)
        else:
            assert needs <= self.capacity
            self.entries.append(Entry(handle, prompt, params, fails_at, list(range(params.n))))
        self.check()

    @rule()
    def step(self):
        waiting = any(not e.handle.done for e in self.entries)
        before = self.engine.stats
        self.engine.step()
        assert not waiting or progress(self.engine.stats) > progress(before), "nothing came of a step"
        self.check()

    @rule(count=st.integers(2, 6))
    def steps(self, count):
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.entries)
    @rule(pick=PICK)
    def cancel(self, pick):
        entry = self.entries[pick % len(self.entries)]
        entry.cancelled |= not entry.handle.done
        entry.handle.cancel()
        assert entry.handle.done
        self.check()

    @precondition(lambda self: self.entries)
    @rule(pick=PICK, k=st.integers(0, 2))
    def fork(self, pick, k):
        entry = self.entries[pick % len(self.entries)]
        root = entry.root or entry
        first = entry.handle._request.sequences[0]
        try:
            handles = entry.handle.fork(k)
        except ValueError:
            assert k == 0 or first.state == "ended"
            handles = []
        else:
            assert k > 0 and len(handles) == k
        for handle in handles:
            sample = root.params.n + root.forks
            root.forks += 1
            branch = Entry(handle, entry.prompt, entry.params, entry.fails_at, [sample], tuple(first.output))
            branch.root = root
            self.entries.append(branch)
        self.check()

    @precondition(lambda self: self.entries)
    @rule(pick=PICK)
    def save_and_load(self, pick):
        entry = self.entries[pick % len(self.entries)]
        path = Path(self.directory.name) / "saved.safetensors"
        done = entry.handle.done
        try:
            entry.handle.save(path)
        except ValueError:
            assert done or not entry.free
        else:
            assert entry.free and not done
            handle = self.engine.load(path)
            again = Entry(handle, entry.prompt, entry.params, None, list(entry.samples), entry.drawn)
            self.entries.append(again)
        self.check()

    @rule(prompt=PROMPTS, deltas=st.integers(0, 3))
    def drop_a_stream(self, prompt, deltas):
        if len(prompt) + 1 > self.capacity:
            return
        before = self.engine.stats.cancelled
        stream = self.engine.stream([prompt], SamplingParams(ignore_eos=True))
        seen = []
        for _ in range(deltas):
            delta = next(stream, None)
            seen += delta.token_ids if delta else []
        expected, _ = fake_answer(prompt, SamplingParams(ignore_eos=True), 0, limit=self.limit())
        assert expected[: len(seen)] == seen
        del stream
        assert self.engine.stats.cancelled == before + (len(seen) < len(expected))
        self.check()

    @rule(where=st.sampled_from(WHERE), nth=st.integers(1, 4), after=st.booleans(), ctrl_c=st.booleans())
    def fail_in_a_step(self, where, nth, after, ctrl_c):
        owner = self.engine
        *path, name = where.split(".")
        for part in path:
            owner = getattr(owner, part)
        real = getattr(owner, name)
        calls = 0

        def failing(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == nth and not after:
                raise KeyboardInterrupt if ctrl_c else RuntimeError("on purpose")
            result = real(*args, **kwargs)
            if calls == nth and after:
                raise KeyboardInterrupt if ctrl_c else RuntimeError("on purpose")
            return result

        setattr(owner, name, failing)
        running = {id(e) for e in self.entries if not e.handle.done}
        try:
            self.engine.step()
        except (KeyboardInterrupt, RuntimeError) as error:
            assert calls >= nth and isinstance(error, KeyboardInterrupt) == ctrl_c
            assert [v.request_id for v in self.engine.slots] == [None] * self.sizes["num_slots"]
            assert sorted(self.engine.free_blocks) == list(range(self.sizes["num_blocks"]))
            broken = 0
            for entry in self.entries:
                errors = [s.error for s in entry.handle._request.sequences if s.error]
                if id(entry) in running and any("RuntimeError: on purpose" in e for e in errors):
                    entry.broken = True
                    broken += len(errors)
            assert not (ctrl_c and broken), "Ctrl-C ended a request"
        else:
            assert calls < nth
        finally:
            delattr(owner, name)
        self.check()

    @precondition(lambda self: self.entries)
    @rule(pick=PICK)
    def wait_for(self, pick):
        entry = self.entries[pick % len(self.entries)]
        try:
            entry.handle.result()
        except RequestError as error:
            assert "on purpose" in str(error)
            assert error.generation is not None
        assert entry.handle.done
        self.check()

    @rule(prompt=PROMPTS)
    def refuse_a_batch(self, prompt):
        before = (self.engine.queue, self.engine.stats)
        for bad in ([], [FAKE_VOCAB], [-1]):
            with pytest.raises(ValueError):
                self.engine.generate([prompt, bad], SamplingParams(max_tokens=1))
        assert (self.engine.queue, self.engine.stats) == before
        self.check()

    @rule()
    def reset(self):
        self.engine.close()
        for entry in self.entries:
            entry.cancelled |= entry.handle._request.sequences[-1].finish_reason == "cancelled"
            assert entry.handle.done
        self.check_answers()
        self.open()
        self.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(4000):
            if all(e.handle.done for e in self.entries):
                break
            self.engine.step()
        self.check()
        assert all(e.handle.done for e in self.entries), "something waits for ever"
        assert_empty(self.engine)
        self.directory.cleanup()


@pytest.mark.time_limit(300)
def test_nothing_breaks_the_engine():
    machine = hypothesis.seed(SEED)(EngineMachine)
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[
            hypothesis.Phase.generate,
            *([hypothesis.Phase.shrink] if "STATE_MACHINE_SHRINK" in os.environ else []),
        ],
    )
    try:
        run_state_machine_as_test(machine, settings=settings)
    except BaseException:
        print(f"To see it again: STATE_MACHINE_SEED={SEED} STATE_MACHINE_EXAMPLES={EXAMPLES}")
        raise
    print(f"{Dictionary.checks} rules were run and checked, seed {SEED}")
    assert "STATE_MACHINE_EXAMPLES" in os.environ or Dictionary.checks >= 20_000
