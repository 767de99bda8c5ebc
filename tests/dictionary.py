"""What should be in an engine on the fake forward, kept beside it in a dictionary and compared with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from engines import fake_answer

from minivllm.engine import BatchEngine
from minivllm.handle import Handle
from minivllm.request import SamplingParams


@dataclass
class Entry:
    """What the dictionary knows of a request."""

    handle: Handle
    prompt: list[int]
    params: SamplingParams
    fails_at: int | None = None
    samples: list[int] = field(default_factory=list)  # numbers of its samples
    drawn: tuple[int, ...] = ()  # what a branch goes on from
    cancelled: bool = False
    broken: bool = False  # a step failed while it was in a slot
    root: Entry | None = None
    forks: int = 0

    @property
    def free(self) -> bool:
        """Whether a file could hold it."""
        return self.params.n == 1 and self.params.logits_fn is None


class Dictionary:
    """Hold an engine, and what is known of each of its requests."""

    checks = 0  # made so far, over all engines
    engine: BatchEngine
    entries: list[Entry]
    sizes: dict
    overlap: bool
    capacity: int
    answers: dict[tuple, tuple[list[int], str]]

    def limit(self):
        return min(self.sizes["max_seq_len"], self.capacity)

    def expected(self, entry: Entry, sample: int) -> tuple[list[int], str]:
        p = entry.params
        key = (*entry.prompt, p.temperature, p.max_tokens, p.ignore_eos, p.seed, sample, entry.drawn, self.limit())
        if key not in self.answers:
            rest, why = fake_answer(entry.prompt, p, p.seed, sample, self.limit(), entry.drawn)
            self.answers[key] = (rest, why)
        tokens, why = self.answers[key]
        if entry.fails_at is not None and len(tokens) > entry.fails_at:
            return tokens[: max(entry.fails_at, len(entry.drawn))], "error"
        return tokens, why

    def check_answers(self):
        for entry in self.entries:
            sequences = entry.handle._request.sequences
            assert [s.sample for s in sequences] == entry.samples
            for sequence in sequences:
                tokens, why = self.expected(entry, sequence.sample)
                got = sequence.output
                assert got == tokens[: len(got)], "another answer than the same request alone"
                if sequence.logprobs is not None:
                    assert [next(iter(d)) for d in sequence.logprobs] == got
                if sequence.state == "ended":
                    allowed = {why} if got == tokens else set()
                    allowed |= {"cancelled"} if entry.cancelled else set()
                    allowed |= {"error"} if entry.broken else set()
                    assert sequence.finish_reason in allowed

    def check(self):
        Dictionary.checks += 1
        engine, scheduler = self.engine, self.engine._scheduler
        engine.check_integrity()
        self.check_answers()
        alive = sorted(
            (e.handle.request_id, s.sample)
            for e in self.entries
            for s in e.handle._request.sequences
            if s.state != "ended"
        )
        held = [v for v in engine.slots if v.request_id is not None]
        assert sorted((v.request_id, v.sample) for v in [*held, *engine.queue]) == alive
        assert sorted(map(id, scheduler.prefilling)) == sorted(
            id(s) for s in scheduler.running if not scheduler.decoding[s.slot]
        )
        assert scheduler.host_logits == sum(s.params.logits_fn is not None for s in scheduler.running)
        self.check_blocks(held)

    def check_blocks(self, held):
        engine, size = self.engine, self.sizes["block_size"]
        kv = engine._runner.cache.kv[0, :, 0, 0, :, 0].numpy()
        owners: dict[int, list[int]] = {}
        for view in held:
            row = engine.block_table[view.slot]
            assert list(row[row >= 0]) == list(view.blocks)
            assert len(view.blocks) == -(-view.num_computed // size)
            tokens = engine._scheduler.slots[view.slot].tokens
            assert view.num_computed - len(tokens) <= (0 if self.overlap else -1), "KV of a token that is not known"
            written = kv[list(view.blocks)].reshape(-1)[: view.num_computed]
            assert np.array_equal(written, tokens[: view.num_computed]), "a row's blocks hold another text"
            assert (engine._runner.cache.block_table.numpy()[view.slot, : len(view.blocks)] == view.blocks).all()
            for i, block in enumerate(view.blocks):
                owners.setdefault(block, []).append(view.num_computed - (i + 1) * size)
        free = engine.free_blocks
        assert len(set(free)) == len(free)
        assert sorted([*free, *owners]) == list(range(self.sizes["num_blocks"]))
        assert all(min(left) >= 0 for left in owners.values() if len(left) > 1), (
            "a block that is written has two owners"
        )
        pool = engine._scheduler.pool
        assert self.sizes["prefix_caching"] or not pool._key
        for block, (_, _, tokens) in pool._key.items():
            assert np.array_equal(kv[block], tokens), "a block that can be hit holds other tokens"
