"""The four stores, and every change to them: queue, slots, free-block list, block table.

`Scheduler` decides what a step computes and learns from what came of it; it never touches the device. Rows that decode live
in arrays, so that a step costs the host the same few numpy calls however many there are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

import numpy as np

from minivllm.batch import Batch, Flags, Ints, SlotSetup
from minivllm.block_pool import BlockPool
from minivllm.request import IntegrityError
from minivllm.sampler import NUM_SLOT_WORDS, slot_words
from minivllm.sequence import Request, Sequence

_MAX_ENDS = 8  # end ids a slot compares in one numpy call; sequences with more are looked at singly


@dataclass
class _DecodeRows:
    """Keep what every step of the same decode rows has in common."""

    slots: Ints
    token_ids: Ints  # all -1: the device has their last tokens
    index: Ints
    sequences: list[Sequence]
    epochs: Ints
    steps: int  # how many steps they can take before one needs a block or is at its limit


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


class Scheduler:
    """Own queue, slots, free-block list and block table, and keep the rules between them.

    Parameters
    ----------
    num_slots : int
    pool : BlockPool
    max_seq_len : int
        Longest sequence, prompt and answer, in tokens.
    max_step_tokens : int
        Tokens computed in one step at most, decode rows included (they are never held back).
    """

    def __init__(self, num_slots: int, pool: BlockPool, max_seq_len: int, max_step_tokens: int) -> None:
        self.num_slots = num_slots
        self.pool = pool
        self.max_seq_len = max_seq_len
        self.max_step_tokens = max_step_tokens
        self.max_blocks = ceil_div(max_seq_len, pool.block_size)
        self.state_stride = NUM_SLOT_WORDS + self.max_blocks
        self.epochs = np.zeros(num_slots, np.int32)  # counts a slot's owners: tells a late token from a valid one
        self.preemptions = 0
        self.generated_tokens = 0
        self._clear()

    def _clear(self) -> None:
        num_slots = self.num_slots
        self.queue: deque[Sequence] = deque()
        self.slots: list[Sequence | None] = [None] * num_slots
        self.table = np.full((num_slots, self.max_blocks), -1, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)  # blocks in each row
        # Rows that decode: their length with the token in flight, and where they end.
        self.decoding = np.zeros(num_slots, np.bool_)
        self.length = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.ends = np.full((num_slots, _MAX_ENDS), -1, np.int32)
        self.special = np.zeros(num_slots, np.bool_)
        self.num_special = 0  # slots of `special` that are set
        self.host_logits = 0  # running sequences with a logits_fn
        self._rows: _DecodeRows | None = None  # None: find them anew
        self.prefilling: list[Sequence] = []  # oldest first
        self.restoring: list[Sequence] = []  # admitted with saved KV that the device has yet to get
        self._updates: list[int] = []
        self._setups: list[SlotSetup] = []
        self.free_slots: list[int] = list(range(num_slots))[::-1]

    # ---------------------------------------------------------------- a step's head

    def admit(self) -> list[Sequence]:
        """Give free slots to the front of the queue, as far as the free-block list can hold it."""
        admitted: list[Sequence] = []
        while self.queue and self.free_slots:
            sequence = self.queue[0]
            shared = self._shared_prefix(sequence)
            if shared is None:
                break  # its prompt is being computed by a sibling: share it when that is done
            blocks, nodes = shared
            total = ceil_div(len(sequence.tokens), self.pool.block_size)
            idle_hits = sum(1 for b in blocks if self.pool.refs[b] == 0)
            if total - len(blocks) > self.pool.num_available - idle_hits - self._promised_blocks():
                break
            self.queue.popleft()
            self._take_slot(sequence, blocks, nodes)
            admitted.append(sequence)
        return admitted

    def _shared_prefix(self, sequence: Sequence) -> tuple[list[int], list[int]] | None:
        """Return written blocks that the sequence can start from; None to wait for a sibling's prompt."""
        size = self.pool.block_size
        if sequence.saved_kv is not None:
            return [], []
        parent = sequence.parent
        if parent is not None and parent.state == "running":
            full = (len(sequence.tokens) - 1) // size
            written = min(self.written(parent), len(parent.tokens)) // size
            if written < full and parent in self.prefilling:
                return None
            n = min(full, written)
            if parent.tokens[: n * size] == sequence.tokens[: n * size]:
                row = self.table[parent.slot, :n].tolist()
                return row, parent.nodes[:n]
        if sequence.params.prompt_logprobs is not None and sequence.num_output == 0:
            return [], []  # every prompt position is wanted, so every one is computed
        return self.pool.match(sequence.tokens)

    def _promised_blocks(self) -> int:
        """Return the blocks that admitted prompts have yet to take."""
        size = self.pool.block_size
        return sum(ceil_div(len(s.tokens), size) - int(self.num_blocks[s.slot]) for s in self.prefilling)

    def _take_slot(self, sequence: Sequence, blocks: list[int], nodes: list[int]) -> None:
        slot = self.free_slots.pop()
        for block in blocks:
            self.pool.share(block)
        self.slots[slot] = sequence
        sequence.slot = slot
        sequence.state = "running"
        sequence.nodes = list(nodes)
        sequence.scheduled = sequence.cached_tokens = len(blocks) * self.pool.block_size
        self.num_blocks[slot] = 0
        self._append_blocks(slot, blocks)
        request = sequence.request
        self.limit[slot] = request.limit
        self.ends[slot] = -1
        ends = sorted(request.end_ids)[:_MAX_ENDS]
        self.ends[slot, : len(ends)] = ends
        self.special[slot] = sequence.special
        self.num_special += sequence.special
        self.host_logits += request.params.logits_fn is not None
        base = slot * self.state_stride
        words = slot_words(request, sequence.sample)
        self._updates += [x for i, word in enumerate(words) for x in (base + i, word)]
        bias = request.bias()
        if request.params.uses_counts or bias:
            self._setups.append(
                SlotSetup(slot, list(sequence.tokens), sequence.prompt_len, request.params.uses_counts, bias)
            )
        if sequence.saved_kv is not None:
            self.restoring.append(sequence)
        self.prefilling.append(sequence)
        self.prefilling.sort(key=lambda s: s.order)
        if sequence.admitted_at == 0:
            sequence.admitted_at = time.perf_counter()

    def restored(self, sequence: Sequence) -> list[int]:
        """Take blocks for a saved sequence's KV and count it as written; return the blocks."""
        tokens = sequence.saved_kv.shape[3]
        self._grow(sequence, ceil_div(tokens, self.pool.block_size), preempt=False)
        sequence.saved_kv = None
        sequence.scheduled = tokens
        self.restoring.remove(sequence)
        return self.row(sequence.slot)

    # ---------------------------------------------------------------- launch

    def plan(self) -> Batch | None:
        """Choose what the next step computes and reserve its blocks; None when there is nothing to compute."""
        if self._rows is None or self._rows.steps == 0:
            self._grow_decode_rows()
            self._rows = None
        chunks: list[tuple[Sequence, int]] = []
        budget = self.max_step_tokens
        if self.prefilling:
            budget -= int((self.decoding & (self.length < self.limit)).sum())
            budget = max(budget, 1)
        for sequence in list(self.prefilling):
            count = min(len(sequence.tokens) - sequence.scheduled, budget)
            if count <= 0 or sequence.slot < 0:
                continue
            if self._grow(sequence, ceil_div(sequence.scheduled + count, self.pool.block_size)):
                chunks.append((sequence, count))
                budget -= count
        batch = self._build(chunks)
        if batch is not None:
            self._updates, self._setups = [], []
        return batch

    def _grow_decode_rows(self) -> None:
        rows = np.flatnonzero(self.decoding & (self.length < self.limit))
        needed = (self.length[rows] + self.pool.block_size - 1) // self.pool.block_size
        short = rows[needed > self.num_blocks[rows]]
        if len(short) == 0:
            return
        waiting = [s for s in (self.slots[row] for row in short) if s is not None]
        for sequence in sorted(waiting, key=lambda s: s.order):
            if sequence.slot >= 0:  # not preempted by an older one meanwhile
                self._grow(sequence, ceil_div(int(self.length[sequence.slot]), self.pool.block_size))

    def _grow(self, sequence: Sequence, blocks: int, preempt: bool = True) -> bool:
        """Bring the row to ``blocks`` blocks; when the pool is dry the youngest gives way, itself at last."""
        while self.num_blocks[sequence.slot] < blocks:
            block = self.pool.allocate()
            if block is not None:
                self._append_blocks(sequence.slot, [block])
            elif not preempt:
                raise IntegrityError("admission promised blocks that the pool does not have")
            else:
                victim = max((s for s in self.slots if s is not None), key=lambda s: s.order)
                self.preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _append_blocks(self, slot: int, blocks: Seq[int]) -> None:
        at = int(self.num_blocks[slot])
        base = slot * self.state_stride + NUM_SLOT_WORDS + at
        for i, block in enumerate(blocks):
            self.table[slot, at + i] = block
            self._updates += (base + i, block)
        self.num_blocks[slot] = at + len(blocks)
        sequence = self.slots[slot]
        if sequence is not None and at + len(blocks) > sequence.max_blocks:
            sequence.max_blocks = at + len(blocks)

    def _build(self, chunks: list[tuple[Sequence, int]]) -> Batch | None:
        if self._rows is None:
            self._rows = self._find_rows()
        rows = self._rows
        if len(rows.slots) == 0 and not chunks:
            return None
        rows.steps -= 1
        lens = self.length[rows.slots]
        self.length[rows.slots] = lens + 1
        batch = Batch(
            num_decode=len(rows.slots),
            token_ids=rows.token_ids,
            positions=lens - 1,
            slots=rows.slots,
            sample_rows=rows.index,
            sample_slots=rows.slots,
            sample_lens=lens,
            updates=self._updates,
            setups=self._setups,
            sequences=rows.sequences,
            epochs=rows.epochs,
        )
        if chunks:
            self._add_chunks(batch, chunks)
            batch.epochs = self.epochs[batch.sample_slots]
        if self.num_special:
            wanted = [s.params.logprobs for s in batch.sequences if s.params.logprobs is not None]
            batch.num_logprobs = max(wanted, default=-1)
        if self.host_logits:
            batch.host_rows = [(r, s) for r, s in enumerate(batch.sequences) if s.params.logits_fn is not None]
        return batch

    def _find_rows(self) -> _DecodeRows:
        slots = np.flatnonzero(self.decoding & (self.length < self.limit)).astype(np.int32)
        length = self.length[slots]
        room = self.num_blocks[slots] * self.pool.block_size - length + 1
        steps = np.minimum(room, self.limit[slots] - length)
        return _DecodeRows(
            slots,
            np.full(len(slots), -1, np.int32),
            np.arange(len(slots), dtype=np.int32),
            [s for s in (self.slots[slot] for slot in slots.tolist()) if s is not None],
            self.epochs[slots],
            int(steps.min()) if len(slots) else 1,
        )

    def _add_chunks(self, batch: Batch, chunks: list[tuple[Sequence, int]]) -> None:
        tokens: list[int] = []
        positions, slots, seq_slots, seq_lens, starts, sample_rows = [], [], [], [], [0], []
        drawn: list[Sequence] = []
        for sequence, count in chunks:
            first, end = sequence.scheduled, sequence.scheduled + count
            tokens += sequence.tokens[first:end]
            positions.append(np.arange(first, end, dtype=np.int32))
            slots.append(np.full(count, sequence.slot, np.int32))
            seq_slots.append(sequence.slot)
            seq_lens.append(end)
            starts.append(starts[-1] + count)
            if sequence.params.prompt_logprobs is not None and first < sequence.prompt_len:
                batch.prompt_logprobs.append((sequence, batch.num_decode + starts[-2], first, count))
            sequence.scheduled = end
            self._register(sequence, end)
            if end == len(sequence.tokens):
                sample_rows.append(batch.num_decode + starts[-1] - 1)
                drawn.append(sequence)
                self.prefilling.remove(sequence)
                self.decoding[sequence.slot] = True
                self._rows = None
                self.length[sequence.slot] = end + 1
        batch.token_ids = np.concatenate([batch.token_ids, np.array(tokens, np.int32)])
        batch.positions = np.concatenate([batch.positions, *positions])
        batch.slots = np.concatenate([batch.slots, *slots])
        batch.seq_slots = np.array(seq_slots, np.int32)
        batch.seq_lens = np.array(seq_lens, np.int32)
        batch.q_starts = np.array(starts, np.int32)
        new_slots = np.array([s.slot for s in drawn], np.int32)
        batch.sample_rows = np.concatenate([batch.sample_rows, np.array(sample_rows, np.int32)])
        batch.sample_slots = np.concatenate([batch.sample_slots, new_slots])
        batch.sample_lens = np.concatenate(
            [batch.sample_lens, np.array([len(s.tokens) for s in drawn], np.int32)]
        )
        batch.sequences = batch.sequences + drawn

    # ---------------------------------------------------------------- collect

    def apply(self, batch: Batch, tokens: Ints) -> list[tuple[int, Sequence]]:
        """Append a step's tokens to the rows that still stand; return the rows to be looked at singly.

        A row is looked at where its token may end it, is its first, is missing (-1), or where its parameters ask for
        it. A row whose slot changed hands since the launch gets nothing.
        """
        slots = batch.sample_slots
        alive = self.epochs[slots] == batch.epochs
        if not alive.all() or tokens.min(initial=0) < 0:
            return self._apply_some(batch, tokens, alive)
        for sequence, token in zip(batch.sequences, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
        known = batch.sample_lens + 1
        self.generated_tokens += len(tokens)
        return self._find_looks(batch, tokens, known, alive)

    def _apply_some(self, batch: Batch, tokens: Ints, alive: Flags) -> list[tuple[int, Sequence]]:
        """Do what `apply` does where a row changed hands or has no token."""
        good = alive & (tokens >= 0)
        for r in np.flatnonzero(good).tolist():
            batch.sequences[r].tokens.append(int(tokens[r]))
        self.generated_tokens += int(good.sum())
        known = np.where(good, batch.sample_lens + 1, 0).astype(np.int32)
        return self._find_looks(batch, tokens, known, alive)

    def _find_looks(self, batch: Batch, tokens: Ints, known: Ints, alive: Flags) -> list[tuple[int, Sequence]]:
        slots, size = batch.sample_slots, self.pool.block_size
        look = (tokens[:, None] == self.ends[slots]).any(1)
        look |= known >= self.limit[slots]
        look |= tokens < 0
        if self.num_special:
            look |= self.special[slots]
        look[batch.num_decode :] = True
        for r in (known % size == 1 % size).nonzero()[0].tolist():
            if known[r] > 0:
                self._register(batch.sequences[r], int(known[r]) - 1)
        return [(r, batch.sequences[r]) for r in look.nonzero()[0].tolist() if alive[r]]

    def _register(self, sequence: Sequence, written: int) -> None:
        """Make the row's full blocks below ``written`` tokens findable."""
        size = self.pool.block_size
        for i in range(len(sequence.nodes), written // size):
            block = int(self.table[sequence.slot, i])
            own = sequence.tokens[i * size : (i + 1) * size]
            sequence.nodes.append(self.pool.register(block, sequence.last_node, own))

    # ---------------------------------------------------------------- leaving a slot

    def release(self, sequence: Sequence) -> None:
        """Give back slot and blocks; the row goes to -1."""
        slot = sequence.slot
        self.pool.release(self.row(slot))
        self.table[slot, : self.num_blocks[slot]] = -1
        self.num_blocks[slot] = 0
        self.slots[slot] = None
        self.epochs[slot] += 1
        self.decoding[slot] = False
        self._rows = None
        self.num_special -= bool(self.special[slot])
        self.special[slot] = False
        self.length[slot] = 0
        self.host_logits -= sequence.params.logits_fn is not None
        self.free_slots.append(slot)
        self.free_slots.sort(reverse=True)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        if sequence in self.restoring:
            self.restoring.remove(sequence)
        sequence.slot = -1

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the front of the queue, to be recomputed."""
        self.release(sequence)
        sequence.reset_progress()
        sequence.preemptions += 1
        self.preemptions += 1
        self.queue.appendleft(sequence)

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is."""
        if sequence.state == "running":
            self.release(sequence)
        elif sequence.state == "queued" and sequence in self.queue:
            self.queue.remove(sequence)

    def rebuild(self, requests: Iterable[Request]) -> None:
        """Bring every store to a good state after an exception: nothing runs, all blocks are free, the rest queues."""
        waiting = [s for request in requests for s in request.sequences if s.state != "ended"]
        for sequence in waiting:
            sequence.reset_progress()
        self.pool.reset()
        self.epochs += 1
        self._clear()
        self.queue.extend(sorted(waiting, key=lambda s: s.order))

    # ---------------------------------------------------------------- looking at it

    def written(self, sequence: Sequence) -> int:
        """Return how many of a running sequence's tokens have KV once the launched steps end."""
        slot = sequence.slot
        return int(self.length[slot]) - 1 if self.decoding[slot] else sequence.scheduled

    def row(self, slot: int) -> list[int]:
        """Return a slot's blocks in order."""
        return [int(b) for b in self.table[slot, : self.num_blocks[slot]]]

    @property
    def running(self) -> list[Sequence]:
        """Sequences in slots, by slot."""
        return [s for s in self.slots if s is not None]

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.queue and all(s is None for s in self.slots)
