"""The four stores: queue, slots, free-block list, block table, and how a sequence enters and leaves them.

Nothing here touches the device: what its copy of a slot's row must learn is noted as ``updates``.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache
from operator import neg

import numpy as np

from minivllm.batch import Ints, SlotSetup
from minivllm.block_pool import BlockPool
from minivllm.request import IntegrityError
from minivllm.sampler import NUM_SLOT_WORDS, slot_words
from minivllm.sequence import Request, Sequence

_MAX_ENDS = 8  # end ids a slot compares in one numpy call; sequences with more are looked at singly


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


@lru_cache(64)
def _ends_row(end_ids: frozenset[int]) -> Ints:
    ends = sorted(end_ids)[:_MAX_ENDS]
    return np.array(ends + [-1] * (_MAX_ENDS - len(ends)), np.int32)


class Stores:
    """Own queue, slots, free-block list and block table, and keep the rules between them.

    Rows that decode live in arrays, so that a step costs the host the same few numpy calls however many there are.
    """

    def __init__(self, num_slots: int, pool: BlockPool, max_seq_len: int) -> None:
        self.num_slots = num_slots
        self.pool = pool
        self.max_blocks = ceil_div(max_seq_len, pool.block_size)
        self.state_stride = NUM_SLOT_WORDS + self.max_blocks
        self.epochs = np.zeros(num_slots, np.int32)  # counts a slot's owners: tells a late token from a valid one
        self.preemptions = 0
        self.on_preempt: Callable[[Sequence], None] = lambda sequence: None  # told before it leaves its slot
        self.generated_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Empty every store."""
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
        self.rows_changed = True  # which slots decode, since the scheduler last looked
        self.prefilling: list[Sequence] = []  # oldest first
        self.restoring: list[Sequence] = []  # admitted with saved KV that the device has yet to get
        self.updates: list[int] = []
        self.setups: list[SlotSetup] = []
        self.free_slots: list[int] = list(range(num_slots))[::-1]

    def take_slot(self, sequence: Sequence, blocks: list[int], nodes: list[int]) -> None:
        """Give a free slot to a sequence that begins with these written blocks."""
        slot = self.free_slots.pop()
        for block in blocks:
            self.pool.share(block)
        self.slots[slot] = sequence
        sequence.slot = slot
        sequence.state = "running"
        sequence.nodes = list(nodes)
        sequence.scheduled = sequence.cached_tokens = len(blocks) * self.pool.block_size
        self.num_blocks[slot] = 0
        if blocks:
            self.append_blocks(slot, blocks)
        request = sequence.request
        self.limit[slot] = request.limit
        self.ends[slot] = _ends_row(request.end_ids)
        self.special[slot] = sequence.special
        self.num_special += sequence.special
        self.host_logits += request.params.logits_fn is not None
        self._update(slot * self.state_stride, slot_words(request, sequence.sample))
        bias = request.bias()
        if request.params.uses_counts or bias:
            self.setups.append(
                SlotSetup(slot, list(sequence.tokens), sequence.prompt_len, request.params.uses_counts, bias)
            )
        if sequence.saved_kv is not None:
            self.restoring.append(sequence)
        bisect.insort(self.prefilling, sequence, key=lambda s: s.order)
        if sequence.admitted_at == 0:
            sequence.admitted_at = time.perf_counter()
            sequence.cached_at_first = sequence.cached_tokens

    def _update(self, at: int, words: Seq[int]) -> None:
        """Note words that the device's state is to hold from this place on."""
        pairs = [0] * (2 * len(words))
        pairs[::2], pairs[1::2] = range(at, at + len(words)), words
        self.updates += pairs

    def append_blocks(self, slot: int, blocks: Seq[int]) -> None:
        """Add blocks to the end of a slot's row."""
        at = int(self.num_blocks[slot])
        end = at + len(blocks)
        self.table[slot, at:end] = blocks
        self._update(slot * self.state_stride + NUM_SLOT_WORDS + at, blocks)
        self.num_blocks[slot] = end
        sequence = self.slots[slot]
        if sequence is not None and end > sequence.max_blocks:
            sequence.max_blocks = end

    def grow(self, sequence: Sequence, blocks: int, preempt: bool = True) -> bool:
        """Bring the row to ``blocks`` blocks; when the pool is dry the youngest gives way, itself at last."""
        while (missing := blocks - int(self.num_blocks[sequence.slot])) > 0:
            if taken := self.pool.take(missing):
                self.append_blocks(sequence.slot, taken)
            elif not preempt:
                raise IntegrityError("admission promised blocks that the pool does not have")
            else:
                victim = max((s for s in self.slots if s is not None), key=lambda s: s.order)
                self.preempt(victim)
                if victim is sequence:
                    return False
        return True

    def register(self, sequence: Sequence, written: int) -> None:
        """Make the row's full blocks below ``written`` tokens findable."""
        size, first, end = self.pool.block_size, len(sequence.nodes), written // self.pool.block_size
        for i, block in enumerate(self.table[sequence.slot, first:end].tolist(), first):
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
        self.rows_changed = True
        self.num_special -= bool(self.special[slot])
        self.special[slot] = False
        self.length[slot] = 0
        self.host_logits -= sequence.params.logits_fn is not None
        bisect.insort(self.free_slots, slot, key=neg)  # the lowest last, to be taken first
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        if sequence in self.restoring:
            self.restoring.remove(sequence)
        sequence.slot = -1

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the front of the queue, to be recomputed."""
        self.on_preempt(sequence)
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
        self.clear()
        self.queue.extend(sorted(waiting, key=lambda s: s.order))

    # ---------------------------------------------------------------- looking at it

    def written(self, sequence: Sequence) -> int:
        """Return how many of a running sequence's tokens have KV once the launched steps end."""
        slot = sequence.slot
        return int(self.length[slot]) - 1 if self.decoding[slot] else sequence.scheduled

    def row(self, slot: int) -> list[int]:
        """Return a slot's blocks in order."""
        blocks: list[int] = self.table[slot, : self.num_blocks[slot]].tolist()
        return blocks

    @property
    def running(self) -> list[Sequence]:
        """Sequences in slots, by slot."""
        return [s for s in self.slots if s is not None]
