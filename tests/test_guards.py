"""Take out one guard of the engine at a time: the check that is named beside it must fail.

Each check passes as the engine stands. So a guard that is lost is noticed, and a check that notices nothing too.
"""

from __future__ import annotations

import guards
import pytest
import torch
from engines import assert_empty, fake_answer, fake_engine, greedy

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
    for late in (False, True):
        engine = fake_engine(num_slots=2, block_size=2)
        engine.submit(P[3], greedy(4)), engine.submit(P[2], greedy(4))
        runner = engine._runner
        if late:  # as a card does: what it did not write is told when its tokens are wanted
            runner.model.forward = lambda inputs, *_: torch.zeros(len(inputs.sample_lens), 1)
            runner.collect = lambda ticket: 1 / 0
        else:
            runner.model.before = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.step()
        runner.model.before = None
        if late:
            del runner.model.forward, runner.collect
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


GUARDS = {
    "the reference count": (guards.without_count, check_shared_blocks),
    "the token comparison": (guards.without_tokens, check_prefix_hits),
    "the comparison of what comes before": (guards.without_parent, check_prefix_hits),
    "the written-block rule": (guards.without_written_rule, check_written_blocks),
    "the transactional add": (guards.without_transaction, check_transaction),
    "the slot release": (guards.without_slot_release, check_slots_come_back),
    "the row's return to -1": (guards.without_row_release, check_slots_come_back),
    "the block release": (guards.without_block_release, check_blocks_come_back),
    "the recomputation after preemption": (guards.without_recompute, check_preemption),
    "the count of a slot's owners": (guards.without_epochs, check_overlap),
    "the token left over by a hit": (guards.without_last_token, check_whole_hit),
    "the rebuilding after an exception": (guards.without_rebuild, check_failing_step),
    "the forgetting of what a failed step wrote": (guards.without_forgetting, check_failing_step),
    "the inbox that is emptied last": (guards.without_peeking, check_interrupted_inbox),
    "the redrawing of a token without log probabilities": (guards.without_trim, check_interrupted_logprobs),
    "the cancel of a dropped stream": (guards.without_cancel, check_dropped_stream),
    "the refusal that harms nobody": (guards.without_refusal, check_refused_fork),
    "the admission limit": (guards.without_capacity, check_admission),
    "the blocks promised to prompts": (guards.without_promises, check_room_for_prompts),
    "the length limit": (guards.without_limit, check_length),
    "the wait for a sibling's prompt": (guards.without_parent_check, check_parents_block),
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
    print(f"{guard}: {check.__name__}: {noticed.type.__name__}: {noticed.value!s:.100}")
