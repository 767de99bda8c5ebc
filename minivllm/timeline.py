"""Who was in which slot at which step: a ring buffer of steps that can be plotted, traced and read."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minivllm.batch import Batch
    from minivllm.runner import Ticket
    from minivllm.scheduler import Scheduler
    from minivllm.sequence import Sequence

_US = 1e6


@dataclass(frozen=True)
class Row:
    """Show one slot in one step: the sample it held, and the tokens computed for it."""

    slot: int
    request_id: int
    sample: int
    phase: str  # "prefill" | "decode"
    num_tokens: int


@dataclass
class Step:
    """Show one step. Times in seconds, ``start`` since the engine was made; ``device_time`` None until collected.

    ``blocks_taken`` and ``blocks_given`` count changes of owners; ``queued`` and ``free_blocks`` are left after it.
    ``admitted``, ``ended`` and ``preempted`` hold (slot, request, sample), the ended ones the reason too.
    """

    step: int
    start: float
    rows: list[Row] = field(default_factory=list)
    host_time: float = 0.0
    device_time: float | None = None
    queued: int = 0
    free_blocks: int = 0
    blocks_taken: int = 0
    blocks_given: int = 0
    cached_tokens: int = 0
    admitted: list[tuple[int, int, int]] = field(default_factory=list)
    ended: list[tuple[int, int, int, str]] = field(default_factory=list)
    preempted: list[tuple[int, int, int]] = field(default_factory=list)


class Timeline:
    """Keep the last steps of an engine; ``enabled = False`` stops it and costs nothing.

    Examples
    --------
    >>> _ = engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    >>> [row.phase for step in engine.timeline for row in step.rows][-2:]
    ['prefill', 'decode']
    """

    def __init__(self, size: int = 4096) -> None:
        self.enabled = True
        self._steps: deque[Step] = deque(maxlen=size)
        self._origin = time.perf_counter()
        self._next = 0
        self._open: Step | None = None
        self._decoding: list[Sequence] | None = None  # the list whose rows are below
        self._rows: list[Row] = []
        self._counters = (0, 0)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(list(self._steps))

    def __getitem__(self, index: int) -> Step:
        return self._steps[index]

    def clear(self) -> None:
        """Forget the steps so far."""
        self._steps.clear()

    # ---------------------------------------------------------------- what the engine tells

    def begin(self) -> Step | None:
        """Open the record of a step; None where the timeline is off."""
        if not self.enabled:
            self._open = None
            return None
        self._open = Step(self._next, time.perf_counter() - self._origin)
        return self._open

    def admitted(self, sequence: Sequence) -> None:
        """Note that a sequence took a slot."""
        if self._open is not None:
            self._open.admitted.append((sequence.slot, *sequence.order))
            self._open.cached_tokens += sequence.cached_tokens

    def ended(self, sequence: Sequence, slot: int) -> None:
        """Note that a sequence left its slot for good."""
        if self._open is not None and slot >= 0:
            self._open.ended.append((slot, *sequence.order, str(sequence.finish_reason)))

    def preempted(self, sequence: Sequence) -> None:
        """Note that a sequence is about to be sent back to the queue."""
        if self._open is not None:
            self._open.preempted.append((sequence.slot, *sequence.order))

    def finish(self, scheduler: Scheduler, batch: Batch | None) -> None:
        """Close the record; a step in which nothing happened is not kept."""
        step, self._open = self._open, None
        if step is None or not (batch or step.ended or step.admitted):
            return
        if batch is not None:
            step.rows = self._rows_of(batch)
        pool = scheduler.pool
        step.queued, step.free_blocks = len(scheduler.queue), pool.num_available
        before, self._counters = self._counters, (pool.num_taken, pool.num_given)
        step.blocks_taken, step.blocks_given = (now - then for now, then in zip(self._counters, before, strict=True))
        step.host_time = time.perf_counter() - self._origin - step.start
        self._next += 1
        self._steps.append(step)

    def _rows_of(self, batch: Batch) -> list[Row]:
        d = batch.num_decode
        decoding = batch.sequences if batch.decode_only else batch.sequences[:d]
        if decoding is not self._decoding:
            self._rows = [Row(s.slot, *s.order, "decode", 1) for s in decoding]
            self._decoding = decoding if batch.decode_only else None
        if batch.decode_only:
            return self._rows
        runs = zip(batch.runs, batch.q_starts[1:] - batch.q_starts[:-1], strict=True)
        return self._rows + [Row(s.slot, *s.order, "prefill", int(n)) for s, n in runs]

    @staticmethod
    def collected(ticket: Ticket) -> None:
        """Note how long the device took."""
        if ticket.step is not None:
            ticket.step.device_time = ticket.device_time()

    # ---------------------------------------------------------------- what people read

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the steps as plain data, oldest first."""
        return [asdict(step) for step in self]

    def spans(self) -> list[tuple[int, int, int, str, float, float]]:
        """Return (slot, request, sample, phase, start, end) in steps for each run of steps that a slot spent alike."""
        out: list[tuple[int, int, int, str, float, float]] = []
        last: dict[int, int] = {}  # slot -> its latest span
        for i, step in enumerate(self):
            for row in step.rows:
                at = last.get(row.slot)
                if at is not None and out[at][1:4] == (row.request_id, row.sample, row.phase) and out[at][5] == i:
                    out[at] = (*out[at][:5], i + 1)
                else:
                    last[row.slot] = len(out)
                    out.append((row.slot, row.request_id, row.sample, row.phase, i, i + 1))
        return out

    def plot(self) -> Figure:
        """Draw slots down and steps across, a bar a request, with the queue's length and the free blocks below.

        Needs matplotlib: ``pip install minivllm[plot]``.
        """
        from minivllm.timeline_plot import plot

        return plot(self)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace for Perfetto: a thread a slot, counters for the queue and the free blocks."""
        steps = list(self)
        events: list[dict[str, Any]] = []

        def end_of(i: int) -> float:
            return steps[i + 1].start if i + 1 < len(steps) else steps[i].start + max(steps[i].host_time, 1e-6)

        for slot, request, sample, phase, first, end in self.spans():
            start = steps[int(first)].start
            name = f"request {request}" + (f".{sample}" if sample else "")
            at = {"ts": start * _US, "dur": (end_of(int(end) - 1) - start) * _US}
            events.append(
                {"name": name, "cat": phase, "ph": "X", "pid": 0, "tid": slot, **at, "args": {"phase": phase}}
            )
        events += [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": slot, "args": {"name": f"slot {slot}"}}
            for slot in sorted({event["tid"] for event in events})
        ]
        for step in steps:
            for name in ("queued", "free_blocks"):
                value = {name: getattr(step, name)}
                events.append({"name": name, "ph": "C", "pid": 0, "ts": step.start * _US, "args": value})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
