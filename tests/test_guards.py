"""Take out one guard of the engine at a time: the check that is named beside it must fail.

Each check passes as the engine stands. So a guard that is lost is noticed, and a check that notices nothing too.
"""

from __future__ import annotations

import pytest
from engines import assert_empty, fake_answer, fake_engine, greedy

from minivllm import intake
from minivllm.block_pool import ROOT, BlockPool
from minivllm.calls import Calls, DeltaStream
from minivllm.engine import BatchEngine
from minivllm.scheduler import Scheduler
from minivllm.sequence import Sequence
from minivllm.stores import Stores

pytestmark = pytest.mark.time_limit(30)

P = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [8, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def drive(engine, handles, most: int = 120) -> None:
    """Step until these have ended, checking everything after each step."""
    for _ in range(most):
        if all(h.done for h in handles):
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError("something waits for ever")


def answer_right(engine, prompts, params, handles=None) -> None:
    """Drive requests to their ends and compare each with what the fake model alone says."""
    handles = handles or [engine.submit(p, params) for p in prompts]
    drive(engine, handles)
    for handle, prompt in zip(handles, prompts, strict=True):
        for sample in handle.result().samples:
            want = fake_answer(prompt, params, params.seed or 0, sample.sample)
            assert (sample.token_ids, sample.finish_reason) == want
    assert_empty(engine)


# -------------------------------------------------------------------- checks


def check_shared_blocks():
    """Samples of one prompt share its blocks, and the first to end does not take them from the others."""
    engine = fake_engine(num_slots=3, block_size=2, num_blocks=32)
    answer_right(engine, P[:1], greedy(6, n=3, temperature=1.0, seed=2))


def check_prefix_hits():
    """Other texts whose blocks have the same hash are no hit."""
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=20)
    engine._scheduler.pool._hash_fn = lambda parent, tokens: 7
    for prompt in [*P, [8, 9, 7], [8, 9, 3, 4, 5], *P]:
        answer_right(engine, [prompt], greedy(4))


def check_written_blocks():
    """A prompt in chunks, and one that begins alike and comes while it is computed."""
    engine = fake_engine(num_slots=2, block_size=2, max_step_tokens=3)
    handles = [engine.submit(P[3], greedy(4))]
    engine.step()
    handles.append(engine.submit(P[3], greedy(4)))
    answer_right(engine, [P[3], P[3]], greedy(4), handles)


def check_transaction():
    """One bad prompt of three: nothing is queued."""
    engine = fake_engine()
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match="prompt 2"):
            call([P[0], P[1], []], greedy(2))
        assert engine.queue == [] and engine.stats.requests == 0 and engine.step() == []
    assert_empty(engine)


def check_slots_come_back():
    """More requests than slots."""
    engine = fake_engine(num_slots=2)
    answer_right(engine, P * 2, greedy(3))


def check_blocks_come_back():
    """More requests than the pool holds at once, some of which share."""
    engine = fake_engine(num_slots=3, block_size=2, num_blocks=9, prefix_caching=False)
    answer_right(engine, P * 2, greedy(3))


def check_preemption():
    """Requests that push each other out."""
    engine = fake_engine(num_slots=3, block_size=2, num_blocks=8)
    answer_right(engine, P[:3], greedy(9))
    assert engine.stats.preemptions > 0


def check_overlap():
    """A step ahead, as on a GPU: a token that was drawn past a row's end belongs to nobody."""
    engine = fake_engine(num_slots=2, block_size=2)
    engine._runner.overlap = True
    stop = {"stop_token_ids": list(range(1, 7))}
    handles = [engine.submit(p, greedy(9, **stop)) for p in P * 3]
    answer_right(engine, P * 3, greedy(9, **stop), handles)


def check_whole_hit():
    """The same prompt again, whose every block is known."""
    engine = fake_engine(num_slots=2, block_size=2)
    for _ in range(2):
        answer_right(engine, [[1, 2, 3, 4], [1, 2, 3, 4]], greedy(4))


def check_failing_step():
    """A step that fails gives everything back, and the cache that it may have half written is forgotten."""
    engine = fake_engine(num_slots=2, block_size=2)
    engine.submit(P[3], greedy(4)), engine.submit(P[2], greedy(4))
    engine._runner.model.before = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine._runner.model.before = None
    assert_empty(engine)
    answer_right(engine, [P[3]], greedy(4))


def check_interrupted_inbox():
    """Ctrl-C while requests are taken in: none is lost."""
    engine = fake_engine()
    handles = [engine.submit(p, greedy(3)) for p in P]
    real = engine._take_inbox

    def interrupted():
        del engine._take_inbox
        real()
        raise KeyboardInterrupt

    engine._take_inbox = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    answer_right(engine, P, greedy(3), handles)


def check_interrupted_logprobs():
    """Ctrl-C between a token and its log probabilities: as many of these as of those."""
    engine = fake_engine()
    handle = engine.submit(P[0], greedy(6, logprobs=1))
    engine.step(), engine.step()
    real = engine._look

    def interrupted(*args):
        engine._look = real
        raise KeyboardInterrupt

    engine._look = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    drive(engine, [handle])
    assert [next(iter(d)) for d in handle.result().logprobs] == handle.result().token_ids


def check_dropped_stream():
    """A reader that goes away."""
    engine = fake_engine(num_slots=1)
    stream = engine.stream([P[0]], greedy(40))
    next(stream)
    del stream
    assert_empty(engine)


def check_refused_fork():
    """What one caller is refused costs nobody else anything."""
    engine = fake_engine()
    handle = engine.submit(P[0], greedy(6))
    engine.step()
    with pytest.raises(ValueError):
        handle.fork(0)
    answer_right(engine, P[:1], greedy(6), [handle])


def check_admission():
    """What an empty pool could not hold is refused at once."""
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=4)
    with pytest.raises(ValueError, match="needs"):
        engine.submit(P[3], greedy(3))
    answer_right(engine, [P[2]], greedy(3))


def check_room_for_prompts():
    """Prompts in chunks: those that were let in can all be computed, with nobody pushed out."""
    engine = fake_engine(num_slots=3, block_size=2, num_blocks=9, max_step_tokens=3, prefix_caching=False)
    answer_right(engine, [P[3], P[3], P[3]], greedy(8))
    assert engine.stats.preemptions == 0


def check_length():
    """An answer ends at its limit."""
    engine = fake_engine(block_size=2, max_seq_len=9)
    handle = engine.submit(P[0], greedy())
    drive(engine, [handle], 20)
    assert len(handle.result().token_ids) == 4


def check_parents_block():
    """A sample waits for the prompt that another one computes, and takes its blocks when they are written."""
    engine = fake_engine(num_slots=3, block_size=2, max_step_tokens=3)
    answer_right(engine, [P[3]], greedy(5, n=3, temperature=1.0, seed=1))
    assert engine.stats.prompt_tokens == 9 + 2 * 1


# -------------------------------------------------------------------- the guards, taken out


def without_count(patch):
    def share(self, block):
        self.cached.pop(block, None)
        self.refs[block] = 1

    patch.setattr(BlockPool, "share", share)


def without_tokens(patch):
    def find(self, parent, tokens):
        return next(iter(self._index.get(self._hash_fn(parent, tokens), ())), None)

    patch.setattr(BlockPool, "_find", find)


def without_parent(patch):
    def find(self, parent, tokens):
        same = self._index.get(self._hash_fn(parent, tokens), ())
        return next((b for b in same if self._key[b][2] == tokens), None)

    patch.setattr(BlockPool, "_find", find)


def without_written_rule(patch):
    real = Stores.register

    def take(self, sequence, blocks, nodes):
        real_take(self, sequence, blocks, nodes)
        missing = len(sequence.tokens) // self.pool.block_size - len(blocks)
        self.append_blocks(sequence.slot, [self.pool.allocate() for _ in range(missing)])
        real(self, sequence, len(sequence.tokens))

    real_take = Stores.take_slot
    patch.setattr(Stores, "take_slot", take)


def without_transaction(patch):
    def add(self, prompts, params):
        make, requests = self._maker(), []
        for i, (p, q) in enumerate(intake.pair(prompts, params)):
            requests.append(make(p, q, i))
            self._commit(requests[-1:])
        return requests

    def answer(self, prompts, params, on_error, progress):
        requests = add(self, prompts, params)
        self._drive(requests)
        return [r.to_generation() for r in requests]

    patch.setattr(Calls, "_add", add)
    patch.setattr(Calls, "_answer", answer)


def without_slot_release(patch):
    real = Stores.release

    def release(self, sequence):
        before = list(self.free_slots)
        real(self, sequence)
        self.free_slots = before

    patch.setattr(Stores, "release", release)


def without_row_release(patch):
    real = Stores.release

    def release(self, sequence):
        slot, row = sequence.slot, self.table[sequence.slot].copy()
        real(self, sequence)
        self.table[slot] = row

    patch.setattr(Stores, "release", release)


def without_block_release(patch):
    patch.setattr(BlockPool, "release", lambda self, blocks: None)


def without_recompute(patch):
    real = Sequence.reset_progress

    def reset(self):
        scheduled = self.scheduled
        real(self)
        self.scheduled = scheduled

    def take(self, sequence, blocks, nodes):
        before = sequence.scheduled
        real_take(self, sequence, blocks, nodes)
        sequence.scheduled = max(before, sequence.scheduled)

    real_take = Stores.take_slot
    patch.setattr(Sequence, "reset_progress", reset)
    patch.setattr(Stores, "take_slot", take)


def without_epochs(patch):
    real = Stores.release

    def release(self, sequence):
        slot = sequence.slot
        real(self, sequence)
        self.epochs[slot] -= 1

    patch.setattr(Stores, "release", release)


def without_last_token(patch):
    real = BlockPool.match
    patch.setattr(BlockPool, "match", lambda self, tokens: real(self, [*tokens, ROOT]))


def without_rebuild(patch):
    patch.setattr(Stores, "rebuild", lambda self, requests: None)


def without_forgetting(patch):
    real = BlockPool.reset

    def reset(self):
        kept = vars(self).copy()
        real(self)
        if "_node" in kept:
            self._node, self._key, self._index = kept["_node"], kept["_key"], kept["_index"]
            self.cached.update(dict.fromkeys(self._node))
            for block in self._node:
                self.free.remove(block)

    patch.setattr(BlockPool, "reset", reset)


def without_peeking(patch):
    def take(self):
        while self._inbox:
            requests = self._inbox.popleft()
            self._scheduler.queue.extend(s for r in requests for s in r.sequences)
        self._requests.update((s.request.ordinal, s.request) for s in self._scheduler.running)

    patch.setattr(BatchEngine, "_take_inbox", take)


def without_trim(patch):
    real = Sequence.rebuild_text

    def rebuild(self):
        tokens = list(self.tokens)
        stop = real(self)
        self.tokens[:] = tokens
        return stop

    patch.setattr(Sequence, "rebuild_text", rebuild)


def without_cancel(patch):
    patch.setattr(DeltaStream, "__del__", lambda self: None)


def without_refusal(patch):
    real = BatchEngine._turn
    patch.setattr(BatchEngine, "_turn", lambda self, repair=True: real(self))


def without_capacity(patch):
    patch.setattr(intake, "ceil_div", lambda a, b: 0)
    real = intake.RequestMaker.__call__

    def call(self, prompt, params, index=0):
        sizes = self.sizes
        object.__setattr__(sizes, "num_blocks", sizes.num_blocks * 100)
        try:
            return real(self, prompt, params, index)
        finally:
            object.__setattr__(sizes, "num_blocks", sizes.num_blocks // 100)

    patch.setattr(intake.RequestMaker, "__call__", call)


def without_promises(patch):
    patch.setattr(Scheduler, "_promised_blocks", lambda self: 0)


def without_limit(patch):
    patch.setattr(Sequence, "end_of_tokens", lambda self: None)


def without_parent_check(patch):
    def shared(self, sequence):
        parent = sequence.parent
        if parent is not None and parent.state == "running":
            n = min((len(sequence.tokens) - 1) // self.pool.block_size, int(self.num_blocks[parent.slot]))
            return self.table[parent.slot, :n].tolist(), parent.nodes[:n]
        return real(self, sequence)

    real = Scheduler._shared_prefix
    patch.setattr(Scheduler, "_shared_prefix", shared)


GUARDS = {
    "the reference count": (without_count, check_shared_blocks),
    "the token comparison": (without_tokens, check_prefix_hits),
    "the comparison of what comes before": (without_parent, check_prefix_hits),
    "the written-block rule": (without_written_rule, check_written_blocks),
    "the transactional add": (without_transaction, check_transaction),
    "the slot release": (without_slot_release, check_slots_come_back),
    "the row's return to -1": (without_row_release, check_slots_come_back),
    "the block release": (without_block_release, check_blocks_come_back),
    "the recomputation after preemption": (without_recompute, check_preemption),
    "the count of a slot's owners": (without_epochs, check_overlap),
    "the token left over by a hit": (without_last_token, check_whole_hit),
    "the rebuilding after an exception": (without_rebuild, check_failing_step),
    "the forgetting of what a failed step wrote": (without_forgetting, check_failing_step),
    "the inbox that is emptied last": (without_peeking, check_interrupted_inbox),
    "the redrawing of a token without log probabilities": (without_trim, check_interrupted_logprobs),
    "the cancel of a dropped stream": (without_cancel, check_dropped_stream),
    "the refusal that harms nobody": (without_refusal, check_refused_fork),
    "the admission limit": (without_capacity, check_admission),
    "the blocks promised to prompts": (without_promises, check_room_for_prompts),
    "the length limit": (without_limit, check_length),
    "the wait for a sibling's prompt": (without_parent_check, check_parents_block),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_every_check_passes_as_the_engine_stands(guard):
    GUARDS[guard][1]()


@pytest.mark.parametrize("guard", GUARDS)
def test_a_missing_guard_is_noticed(guard, monkeypatch):
    take_out, check = GUARDS[guard]
    take_out(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)) as noticed:
        check()
    print(f"{guard}: {check.__name__}: {noticed.type.__name__}: {str(noticed.value):.100}")
