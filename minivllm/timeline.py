"""Who was in which slot at which step: a ring buffer of steps that can be plotted, traced and read."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minivllm.batch import Batch
    from minivllm.scheduler import Scheduler
    from minivllm.sequence import Sequence
    from minivllm.ticket import Ticket


@dataclass(frozen=True)
class Row:
    """Show one slot in one step: the sample it held, and the tokens computed for it."""

    slot: int
    request_id: int
    sample: int
    phase: str  # "prefill" | "decode"
    num_tokens: int


class Work:
    """Hold the rows of one batch, made into `Row` objects when somebody looks: a busy engine has no time for it."""

    def __init__(self, slots: list[int], orders: list[tuple[int, int]], num_decode: int, lengths: list[int]) -> None:
        self._parts = (slots, orders, num_decode, lengths)
        self._rows: list[Row] | None = None

    @property
    def rows(self) -> list[Row]:
        """The rows, those that decode first."""
        if self._rows is None:
            slots, orders, d, lengths = self._parts
            counts = [1] * d + lengths
            phases = ["decode"] * d + ["prefill"] * len(lengths)
            parts = zip(slots, orders, phases, counts, strict=True)
            self._rows = [Row(slot, *order, phase, n) for slot, order, phase, n in parts]
        return self._rows


_NO_WORK = Work([], [], 0, [])


@dataclass
class Step:
    """Show one step. Times in seconds, ``start`` since the engine was made.

    ``device_time`` is None until the step was collected, and where nothing was launched.
    ``blocks_taken`` and ``blocks_given`` count changes of owners; ``queued`` and ``free_blocks`` are left after it.
    ``admitted``, ``ended`` and ``preempted`` hold (slot, request, sample), the ended ones the reason too; their slot is
    -1 where they ended in the queue, or by an exception that emptied all slots.
    """

    step: int
    start: float
    work: Work = field(default=_NO_WORK, repr=False)
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

    @property
    def rows(self) -> list[Row]:
        """What was computed: a row a slot."""
        return self.work.rows

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "work"}
        return {**own, "rows": [asdict(row) for row in self.rows]}


class Span(NamedTuple):
    """Show a run of steps that a slot spent on one sample in one phase; ``start`` and ``end`` count the steps kept."""

    slot: int
    request_id: int
    sample: int
    phase: str
    start: int
    end: int


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
        self._decoding: list[Sequence] | None = None  # the list whose work is below
        self._work = _NO_WORK
        self._counters = (0, 0)
        self._between: list[tuple[int, int, int, str]] = []  # ended by a cancel, between two steps

    def __repr__(self) -> str:
        steps = list(self._steps)
        seconds = end_of(steps, len(steps) - 1) - steps[0].start if steps else 0.0
        return f"<Timeline of {len(steps)} steps in {seconds:.3f} s{'' if self.enabled else ', off'}>"

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
        if self._open is not None and (self._open.admitted or self._open.ended):
            self._keep(self._open)  # an exception cut it short
        if not self.enabled:
            self._open = None
            return None
        self._open = Step(self._next, time.perf_counter() - self._origin)
        if self._between:
            self._open.ended, self._between = self._between, []
        return self._open

    def admitted(self, sequence: Sequence) -> None:
        """Note that a sequence took a slot."""
        if self._open is not None:
            self._open.admitted.append((sequence.slot, *sequence.order))
            self._open.cached_tokens += sequence.cached_tokens

    def ended(self, sequence: Sequence, slot: int) -> None:
        """Note that a sequence ended, in this slot or, -1, in none."""
        if self.enabled:
            ended = self._between if self._open is None else self._open.ended
            ended.append((slot, *sequence.order, str(sequence.finish_reason)))

    def preempted(self, sequence: Sequence) -> None:
        """Note that a sequence is about to be sent back to the queue."""
        if self._open is not None:
            self._open.preempted.append((sequence.slot, *sequence.order))

    def finish(self, scheduler: Scheduler, batch: Batch | None) -> None:
        """Close the record; a step in which nothing happened is not kept."""
        step, self._open = self._open, None
        pool = scheduler.pool
        if step is None:
            self._counters = (pool.num_taken, pool.num_given)
            return
        if not (batch or step.ended or step.admitted):
            return
        if batch is not None:
            step.work = self._work_of(batch)
        step.queued, step.free_blocks = len(scheduler.queue), pool.num_available
        before, self._counters = self._counters, (pool.num_taken, pool.num_given)
        step.blocks_taken, step.blocks_given = (now - then for now, then in zip(self._counters, before, strict=True))
        step.host_time = time.perf_counter() - self._origin - step.start
        self._keep(step)

    def _keep(self, step: Step) -> None:
        self._next += 1
        self._steps.append(step)

    def _work_of(self, batch: Batch) -> Work:
        if batch.decode_only and batch.sequences is self._decoding:
            return self._work
        d = batch.num_decode
        # Slots as the batch has them: a sequence that ended in this very step has none any more.
        slots = batch.slots[:d].tolist() + batch.seq_slots.tolist()
        orders = [s.order for s in batch.sequences[:d]] + [s.order for s in batch.runs]
        lengths = [] if batch.decode_only else (batch.q_starts[1:] - batch.q_starts[:-1]).tolist()
        self._work = Work(slots, orders, d, lengths)
        self._decoding = batch.sequences if batch.decode_only else None
        return self._work

    @staticmethod
    def collected(ticket: Ticket) -> None:
        """Note how long the device took."""
        if ticket.step is not None:
            ticket.step.device_time = ticket.device_time()

    # ---------------------------------------------------------------- what people read

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the steps as plain data, oldest first."""
        return [step.to_dict() for step in self]

    def spans(self) -> list[Span]:
        """Return each run of steps that a slot spent alike: one sample, one phase."""
        return spans_of(list(self))

    def plot(self, x: Literal["time", "step"] = "time") -> Figure:
        """Draw slots down and time across, a bar a request, with the queue's length and the free blocks below.

        With ``x="step"`` every step is equally wide. Needs matplotlib: ``pip install 'minivllm[plot]'``.

        Examples
        --------
        >>> figure = engine.timeline.plot()
        >>> figure.savefig(tmp / "timeline.png")
        """
        from minivllm.timeline_plot import plot

        return plot(list(self), x)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace for https://ui.perfetto.dev: a thread a slot, one for the steps, counters.

        Examples
        --------
        >>> engine.timeline.save(tmp / "trace.json")
        """
        from minivllm.timeline_trace import events

        trace = {"traceEvents": events(list(self)), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")


def spans_of(steps: Seq[Step]) -> list[Span]:
    """Return the spans of these steps, in the order of their beginnings."""
    out: list[Span] = []
    last: dict[int, int] = {}  # slot -> its latest span
    i = 0
    while i < len(steps):
        work, end = steps[i].work, i + 1
        while end < len(steps) and steps[end].work is work:  # steps that only decode share it
            end += 1
        for row in work.rows:
            at = last.get(row.slot)
            if at is not None and out[at][1:4] == (row.request_id, row.sample, row.phase) and out[at].end == i:
                out[at] = out[at]._replace(end=end)
            else:
                last[row.slot] = len(out)
                out.append(Span(row.slot, row.request_id, row.sample, row.phase, i, end))
        i = end
    return out


def end_of(steps: Seq[Step], i: int) -> float:
    """Return when a step's work was over, at the latest when the next began; seconds."""
    step = steps[i]
    end = step.start + max(step.host_time, step.device_time or 0.0)
    return min(end, steps[i + 1].start) if i + 1 < len(steps) else end


def seconds_of(steps: Seq[Step], span: Span) -> tuple[float, float]:
    """Return a span in seconds. A slot that is not left is held until the next step, however late that comes."""
    last = span.end - 1
    left = {who[1:3] for who in (*steps[last].preempted, *steps[last].ended)}
    held = span[1:3] not in left and span.end < len(steps)
    return steps[span.start].start, steps[span.end].start if held else end_of(steps, last)
