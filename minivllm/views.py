"""What the engine shows of itself: plain snapshots that nothing changes afterwards."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from minivllm import html
from minivllm.lock import FairLock
from minivllm.scheduler import Scheduler
from minivllm.sequence import Request, Sequence


@dataclass(frozen=True)
class SlotView:
    """Show one slot; ``request_id`` is None where it is free.

    Printed, a sample is called by its request's number, and by its own behind a dot where that is not 0: ``1.2`` is
    sample 2 of request 1.
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
class BlockView:
    """Show one block of the KV cache; ``owners`` holds (request, sample) of each row that has it.

    A cached block belongs to nobody, and its KV is still good for a prompt that begins alike.
    """

    block: int
    state: Literal["free", "owned", "cached"] = "free"
    refs: int = 0
    owners: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class EngineStats:
    """Count since the engine was made; tokens and steps.

    Of the prompts, ``prompt_tokens`` were computed and ``cached_tokens`` found in the prefix cache. Both count a token
    once a sample: what is computed again after a preemption is not counted again.

    ``requests`` counts requests that were queued, a fork and a loaded one too; a prompt that was refused is none. The
    others count samples, ``n`` of them a request: ``stopped``, ``length``, ``cancelled`` and ``errors`` by how they
    ended, ``running`` and ``queued`` those in slots and those that wait, ``preemptions`` each time one was sent back.
    """

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

    def __str__(self) -> str:
        return html.stats_text(self)

    def _repr_html_(self) -> str:
        return html.stats_html(self)


class SlotList(list[SlotView]):
    """A list that prints, and shows in a notebook, as a table."""

    def __str__(self) -> str:
        return html.slots_text(self)

    def _repr_html_(self) -> str:
        return html.slots_html(self)


class QueueList(list[QueueView]):
    """A list that prints, and shows in a notebook, as a table."""

    def __str__(self) -> str:
        return html.queue_text(self)

    def _repr_html_(self) -> str:
        return html.queue_html(self)


class BlockList(list[BlockView]):
    """A list that prints, and shows in a notebook, as a map of the pool."""

    def __str__(self) -> str:
        return html.blocks_text(self)

    def _repr_html_(self) -> str:
        return html.blocks_html(self)


class BlockTable(np.ndarray[Any, np.dtype[np.int32]]):
    """An int32 array that prints its used rows; what is computed or cut from it is a plain array."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **kwargs: Any) -> Any:
        if "out" in kwargs:
            kwargs["out"] = tuple(_plain(x) for x in kwargs["out"])
        return getattr(ufunc, method)(*(_plain(x) for x in inputs), **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return _plain(self)[key]

    def __str__(self) -> str:
        return html.table_text(self.tolist()) if self.ndim == 2 else str(_plain(self))

    def _repr_html_(self) -> str | None:
        return html.table_html(self.tolist()) if self.ndim == 2 else None


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, BlockTable) else x


@dataclass(frozen=True)
class Snapshot:
    """Hold what there is to see at one moment, taken in one hold of the engine's lock."""

    slots: SlotList
    queue: QueueList
    refs: list[int]  # owners of each block
    cached: list[int]  # blocks that nobody owns, kept for a prefix
    stats: EngineStats

    def blocks(self) -> BlockList:
        """Return a view of every block."""
        owners: dict[int, list[tuple[int, int]]] = {}
        for view in self.slots:
            if view.request_id is not None:
                for block in view.blocks:
                    owners.setdefault(block, []).append((view.request_id, view.sample))
        cached = set(self.cached)
        return BlockList(
            BlockView(i, "owned", refs, tuple(owners.get(i, ())))
            if refs
            else BlockView(i, "cached" if i in cached else "free")
            for i, refs in enumerate(self.refs)
        )


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
        tuple(scheduler.table[slot, : scheduler.num_blocks[slot]].tolist()),
        sequence.cached_tokens,
    )


class Views:
    """Hold the read-only snapshots of `BatchEngine`."""

    _scheduler: Scheduler
    _inbox: deque[list[Request]]
    _counts: Counter[str]
    _lock: FairLock
    _closed: bool

    @property
    def slots(self) -> SlotList:
        """One view a slot, in order.

        Examples
        --------
        >>> _ = engine.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)), engine.step()
        >>> [(view.slot, view.phase, view.prompt_tokens) for view in engine.slots]
        [(0, 'decode', 3), (1, 'free', 0)]
        """
        with self._lock.held():
            return SlotList(view_slot(self._scheduler, i) for i in range(self._scheduler.num_slots))

    @property
    def queue(self) -> QueueList:
        """The sequences that wait, front first.

        Examples
        --------
        >>> handles = [engine.submit([1, 2, 3], SamplingParams(max_tokens=4)) for _ in range(3)]
        >>> [view.prompt_tokens for view in engine.queue]
        [3, 3, 3]
        """
        with self._lock.held():
            waiting = [s for requests in list(self._inbox) for r in requests for s in r.sequences]
            return QueueList(view_queued(s) for s in (*self._scheduler.queue, *waiting))

    @property
    def blocks(self) -> BlockList:
        """One view a block: who owns it, or whether it is cached or free."""
        return self.snapshot().blocks()

    @property
    def free_blocks(self) -> list[int]:
        """Blocks that nobody owns, in the order they are taken: the empty ones, then those cached for a prefix.

        Examples
        --------
        >>> _ = engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
        >>> len(engine.free_blocks) == engine.sizes.num_blocks
        True
        """
        with self._lock.held():
            pool = self._scheduler.pool
            return [*pool.free, *pool.cached]

    @property
    def block_table(self) -> BlockTable:
        """A copy of the block table, ``int32[num_slots, max_blocks]``, -1 where there is no block.

        Examples
        --------
        >>> engine.block_table.dtype, bool((engine.block_table == -1).all())
        (dtype('int32'), True)
        """
        with self._lock.held():
            table: BlockTable = self._scheduler.table.copy().view(BlockTable)
            return table

    @property
    def stats(self) -> EngineStats:
        """What the engine has done and holds.

        Examples
        --------
        >>> _ = engine.generate([[1, 2], [3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
        >>> engine.stats.prompt_tokens, engine.stats.generated_tokens, engine.stats.length
        (5, 6, 2)
        """
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

    def snapshot(self) -> Snapshot:
        """Return slots, queue, blocks and counters of one moment; waits for a running step and delays the next little.

        Examples
        --------
        >>> snapshot = engine.snapshot()
        >>> len(snapshot.slots), len(snapshot.blocks()) == snapshot.stats.blocks_total
        (2, True)
        """
        with self._lock.held():
            pool = self._scheduler.pool
            return Snapshot(self.slots, self.queue, list(pool.refs), list(pool.cached), self.stats)

    def _repr_html_(self) -> str:
        if self._closed:
            return html.title_html(repr(self))
        now = self.snapshot()
        title, blocks = html.title_html(repr(self)), now.blocks()
        return title + html.slots_html(now.slots) + html.blocks_html(blocks) + html.queue_html(now.queue)
