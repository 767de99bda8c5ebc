"""What the engine shows of itself: plain snapshots that nothing changes afterwards."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from minivllm.lock import FairLock
from minivllm.scheduler import Scheduler
from minivllm.sequence import Request, Sequence


@dataclass(frozen=True)
class SlotView:
    """Show one slot; ``request_id`` is None where it is free.

    ``phase`` tells whether the prompt is still being computed. ``num_tokens`` counts prompt and answer so far,
    ``num_computed`` those with KV, ``limit`` is the length at which it ends at the latest.
    """

    slot: int
    request_id: int | None = None
    sample: int = 0
    phase: Literal["free", "prefill", "decode"] = "free"
    prompt_tokens: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    limit: int = 0
    blocks: tuple[int, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True)
class QueueView:
    """Show one waiting sequence."""

    request_id: int
    sample: int
    prompt_tokens: int
    num_tokens: int
    preemptions: int


@dataclass(frozen=True)
class EngineStats:
    """Count since the engine was made; tokens and steps."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    stopped: int = 0
    length: int = 0
    cancelled: int = 0
    errors: int = 0
    preemptions: int = 0
    running: int = 0
    queued: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0


def view_queued(sequence: Sequence) -> QueueView:
    """Return the view of a waiting sequence."""
    return QueueView(
        sequence.request.ordinal,
        sequence.sample,
        sequence.prompt_len,
        len(sequence.tokens),
        sequence.preemptions,
    )


def view_slot(scheduler: Scheduler, slot: int) -> SlotView:
    """Return the view of a slot."""
    sequence = scheduler.slots[slot]
    if sequence is None:
        return SlotView(slot)
    return SlotView(
        slot,
        sequence.request.ordinal,
        sequence.sample,
        "decode" if scheduler.decoding[slot] else "prefill",
        sequence.prompt_len,
        len(sequence.tokens),
        scheduler.written(sequence),
        sequence.request.limit,
        tuple(scheduler.row(slot)),
        sequence.cached_tokens,
    )


class Views:
    """Hold the read-only snapshots of `BatchEngine`."""

    _scheduler: Scheduler
    _inbox: deque[list[Request]]
    _counts: Counter[str]
    _lock: FairLock

    @property
    def slots(self) -> list[SlotView]:
        """One view a slot, in order."""
        with self._lock:
            return [view_slot(self._scheduler, i) for i in range(self._scheduler.num_slots)]

    @property
    def queue(self) -> list[QueueView]:
        """The sequences that wait, front first."""
        with self._lock:
            waiting = [s for requests in list(self._inbox) for r in requests for s in r.sequences]
            return [view_queued(s) for s in (*self._scheduler.queue, *waiting)]

    @property
    def free_blocks(self) -> list[int]:
        """Blocks that nobody owns, in the order they are taken: the empty ones, then those cached for a prefix."""
        with self._lock:
            pool = self._scheduler.pool
            return [*pool.free, *pool.cached]

    @property
    def block_table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """A copy of the block table, ``int32[num_slots, max_blocks]``, -1 where there is no block."""
        with self._lock:
            table: np.ndarray[Any, np.dtype[np.int32]] = self._scheduler.table.copy()
            return table

    @property
    def stats(self) -> EngineStats:
        """What the engine has done and holds."""
        counts, scheduler = self._counts, self._scheduler
        names = ("steps", "prompt_tokens", "cached_tokens", "requests", "length", "cancelled")
        return EngineStats(
            **{name: counts[name] for name in names},
            generated_tokens=scheduler.generated_tokens,
            stopped=counts["stop"],
            errors=counts["error"],
            preemptions=scheduler.preemptions,
            running=len(scheduler.running),
            queued=len(self.queue),
            blocks_total=scheduler.pool.num_blocks,
            blocks_free=len(scheduler.pool.free),
            blocks_cached=len(scheduler.pool.cached),
        )
