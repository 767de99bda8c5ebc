"""What a step computes, and what is learnt from what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minivllm.batch import Batch, Ints
from minivllm.block_pool import BlockPool
from minivllm.sequence import Sequence
from minivllm.stores import Stores, ceil_div

_NO_SLOTS: Ints = np.empty(0, np.int32)


@dataclass
class _DecodeRows:
    """Keep what every step of the same decode rows has in common."""

    slots: Ints
    token_ids: Ints  # all -1: the device has their last tokens
    index: Ints
    sequences: list[Sequence]
    epochs: Ints
    steps: int  # how many steps they can take before one needs a block or is at its limit


class Scheduler(Stores):
    """Admit from the queue, plan a step, apply its tokens.

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
        super().__init__(num_slots, pool, max_seq_len)
        self.max_step_tokens = max_step_tokens
        self._positions = np.arange(max_seq_len, dtype=np.int32)
        self._rows = self._find_rows()

    # ---------------------------------------------------------------- a step's head

    def admit(self) -> list[Sequence]:
        """Give free slots to the front of the queue, as far as the free-block list can hold it."""
        admitted: list[Sequence] = []
        promised = self._promised_blocks() if self.queue and self.free_slots else 0
        while self.queue and self.free_slots:
            sequence = self.queue[0]
            shared = self._shared_prefix(sequence)
            if shared is None:
                break  # its prompt is being computed by a sibling: share it when that is done
            blocks, nodes = shared
            total = ceil_div(len(sequence.tokens), self.pool.block_size)
            idle_hits = sum(1 for b in blocks if self.pool.refs[b] == 0)
            if total - len(blocks) > self.pool.num_available - idle_hits - promised:
                break
            promised += total - len(blocks)
            self.queue.popleft()
            self.take_slot(sequence, blocks, nodes)
            admitted.append(sequence)
        return admitted

    def _decode_slots(self) -> Ints:
        """Return the slots that draw a further token in the next step."""
        if len(self.free_slots) + len(self.prefilling) == self.num_slots:
            return _NO_SLOTS
        return np.flatnonzero(self.decoding & (self.length < self.limit)).astype(np.int32)

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

    def restored(self, sequence: Sequence) -> list[int]:
        """Take blocks for a saved sequence's KV and count it as written; return the blocks."""
        tokens = sequence.saved_kv.shape[3]
        self.grow(sequence, ceil_div(tokens, self.pool.block_size), preempt=False)
        sequence.saved_kv = None
        sequence.scheduled = tokens
        self.restoring.remove(sequence)
        return self.row(sequence.slot)

    # ---------------------------------------------------------------- launch

    def plan(self) -> Batch | None:
        """Choose what the next step computes and reserve its blocks; None when there is nothing to compute."""
        if self.rows_changed or self._rows.steps == 0:
            self._grow_decode_rows()
            self.rows_changed = True  # blocks at least
        chunks: list[tuple[Sequence, int]] = []
        budget = max(self.max_step_tokens - len(self._decode_slots()), 1) if self.prefilling else 0
        for sequence in list(self.prefilling):
            count = min(len(sequence.tokens) - sequence.scheduled, budget)
            if count <= 0 or sequence.slot < 0:
                continue
            if self.grow(sequence, ceil_div(sequence.scheduled + count, self.pool.block_size)):
                chunks.append((sequence, count))
                budget -= count
        batch = self._build(chunks)
        if batch is not None:
            self.updates, self.setups = [], []
        return batch

    def _grow_decode_rows(self) -> None:
        rows = self._decode_slots()
        if len(rows) == 0:
            return
        needed = (self.length[rows] + self.pool.block_size - 1) // self.pool.block_size
        short = rows[needed > self.num_blocks[rows]]
        if len(short) == 0:
            return
        waiting = [s for s in (self.slots[row] for row in short) if s is not None]
        for sequence in sorted(waiting, key=lambda s: s.order):
            if sequence.slot >= 0:  # not preempted by an older one meanwhile
                self.grow(sequence, ceil_div(int(self.length[sequence.slot]), self.pool.block_size))

    def _build(self, chunks: list[tuple[Sequence, int]]) -> Batch | None:
        if self.rows_changed:
            self._rows = self._find_rows()
            self.rows_changed = False
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
            updates=self.updates,
            setups=self.setups,
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
        slots = self._decode_slots()
        if len(slots) == 0:
            return _DecodeRows(slots, slots, slots, [], slots, 1)
        length = self.length[slots]
        room = self.num_blocks[slots] * self.pool.block_size - length + 1
        steps = np.minimum(room, self.limit[slots] - length)
        return _DecodeRows(
            slots,
            np.full(len(slots), -1, np.int32),
            np.arange(len(slots), dtype=np.int32),
            [s for s in (self.slots[slot] for slot in slots.tolist()) if s is not None],
            self.epochs[slots],
            int(steps.min()),
        )

    def _add_chunks(self, batch: Batch, chunks: list[tuple[Sequence, int]]) -> None:
        tokens, positions, seq_slots, seq_lens, starts, sample_rows = [], [], [], [], [0], []
        drawn: list[Sequence] = []
        for sequence, count in chunks:
            first, end = sequence.scheduled, sequence.scheduled + count
            tokens.append(sequence.ids(first, end))
            positions.append(self._positions[first:end])
            seq_slots.append(sequence.slot)
            seq_lens.append(end)
            starts.append(starts[-1] + count)
            if sequence.params.prompt_logprobs is not None and first < sequence.prompt_len:
                batch.prompt_logprobs.append((sequence, batch.num_decode + starts[-2], first, count))
            sequence.scheduled = end
            if end == len(sequence.tokens):
                sample_rows.append(batch.num_decode + starts[-1] - 1)
                drawn.append(sequence)
                self.prefilling.remove(sequence)
        batch.token_ids = np.concatenate([batch.token_ids, *tokens])
        batch.positions = np.concatenate([batch.positions, *positions])
        batch.seq_slots = np.array(seq_slots, np.int32)
        batch.seq_lens = np.array(seq_lens, np.int32)
        batch.q_starts = np.array(starts, np.int32)
        runs = np.repeat(batch.seq_slots, batch.q_starts[1:] - batch.q_starts[:-1])
        batch.slots = np.concatenate([batch.slots, runs]) if batch.num_decode else runs
        new_slots = np.array([s.slot for s in drawn], np.int32)
        new_lens = np.array([len(s.tokens) for s in drawn], np.int32)
        if drawn:
            self.decoding[new_slots] = True
            self.length[new_slots] = new_lens + 1
            self.rows_changed = True
        batch.sample_rows = np.concatenate([batch.sample_rows, np.array(sample_rows, np.int32)])
        batch.sample_slots = np.concatenate([batch.sample_slots, new_slots])
        batch.sample_lens = np.concatenate([batch.sample_lens, new_lens])
        batch.runs = [sequence for sequence, _ in chunks]
        batch.sequences = batch.sequences + drawn

    def launched(self, batch: Batch) -> None:
        """Make the blocks that a launched step fills findable: every later step runs after it."""
        for sequence in batch.runs:
            self.register(sequence, sequence.scheduled)

    # ---------------------------------------------------------------- collect

    def apply(self, batch: Batch, tokens: Ints) -> list[tuple[int, Sequence]]:
        """Append a step's tokens to the rows that still stand; return the rows to be looked at singly.

        A row is looked at where its token may end it, is its first, is missing (-1), or where its parameters ask for
        it. A row whose slot changed hands since the launch gets nothing.
        """
        d = batch.num_decode
        looks = self._apply_decode(batch, tokens[:d]) if d else []
        for r, token in enumerate(tokens[d:].tolist(), d):  # few, and each is the first of its sequence
            sequence = batch.sequences[r]
            if self.epochs[batch.sample_slots[r]] != batch.epochs[r]:
                continue
            if token >= 0:
                sequence.tokens.append(token)
                self.generated_tokens += 1
            looks.append((r, sequence))
        return looks

    def _apply_decode(self, batch: Batch, tokens: Ints) -> list[tuple[int, Sequence]]:
        """Do what `apply` does for the rows that decode, which come first."""
        d = len(tokens)
        slots, known = batch.sample_slots[:d], batch.sample_lens[:d] + 1
        alive = self.epochs[slots] == batch.epochs[:d]
        if alive.all() and tokens.min() >= 0:
            for sequence, token in zip(batch.sequences, tokens.tolist(), strict=False):
                sequence.tokens.append(token)
            self.generated_tokens += d
        else:
            good = alive & (tokens >= 0)
            for r in np.flatnonzero(good).tolist():
                batch.sequences[r].tokens.append(int(tokens[r]))
            self.generated_tokens += int(good.sum())
            known[~good] = 0
        look = (tokens[:, None] == self.ends[slots]).any(1)
        look |= known >= self.limit[slots]
        look |= tokens < 0
        if self.num_special:
            look |= self.special[slots]
        size = self.pool.block_size
        for r in (known % size == 1 % size).nonzero()[0].tolist():
            if known[r] > 0:
                self.register(batch.sequences[r], int(known[r]) - 1)
        return [(r, batch.sequences[r]) for r in look.nonzero()[0].tolist() if alive[r]]
