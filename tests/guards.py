"""The guards of the engine, each with a way to take it out."""

from __future__ import annotations

from minivllm import intake
from minivllm.block_pool import ROOT, BlockPool
from minivllm.calls import Calls, DeltaStream
from minivllm.engine import BatchEngine
from minivllm.scheduler import Scheduler
from minivllm.sequence import Sequence
from minivllm.stores import Stores


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
