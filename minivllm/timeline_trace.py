"""The timeline as a Chrome trace, the JSON that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.html import name_of
from minivllm.timeline import Step, end_of, seconds_of, spans_of

_STEPS = 0  # the thread of the steps; a slot's is its number + 1


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _complete(name: str, category: str, thread: int, start: float, end: float, **args: Any) -> dict[str, Any]:
    ts = _micros(start)
    dur = max(round(_micros(end) - ts, 3), 0.0)
    return {"name": name, "cat": category, "ph": "X", "pid": 0, "tid": thread, "ts": ts, "dur": dur, "args": args}


def _metadata(name: str, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if name.endswith("sort_index") else "name"
    return {"name": name, "ph": "M", "pid": 0, "tid": thread, "args": {key: value}}


def events(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return the trace's events: names of threads first, then by time."""
    spans = spans_of(steps)
    head = [_metadata("process_name", _STEPS, "minivllm"), _metadata("thread_name", _STEPS, "steps")]
    for slot in sorted({span.slot for span in spans}):
        head.append(_metadata("thread_name", slot + 1, f"slot {slot}"))
        head.append(_metadata("thread_sort_index", slot + 1, slot + 1))
    out = [
        _complete(
            f"request {name_of(span.request_id, span.sample)}",
            span.phase,
            span.slot + 1,
            *seconds_of(steps, span),
            phase=span.phase,
            request=span.request_id,
            sample=span.sample,
            steps=span.end - span.start,
        )
        for span in spans
    ]
    for i, step in enumerate(steps):
        prefill = sum(row.num_tokens for row in step.rows if row.phase == "prefill")
        decode = sum(row.num_tokens for row in step.rows if row.phase == "decode")
        words = {"prefill_tokens": prefill, "decode_tokens": decode, "device_time": step.device_time}
        words |= {"blocks_taken": step.blocks_taken, "blocks_given": step.blocks_given}
        words |= {"cached_tokens": step.cached_tokens}
        out.append(_complete(f"step {step.step}", "step", _STEPS, step.start, end_of(steps, i), **words))
        at = {"pid": 0, "ts": _micros(step.start)}
        counters = {"queued": step.queued, "free blocks": step.free_blocks, "tokens": prefill + decode}
        out += [{"name": name, "ph": "C", **at, "args": {name: value}} for name, value in counters.items()]
        for slot, request, sample in step.preempted:
            name = f"request {name_of(request, sample)} goes back to the queue"
            out.append({"name": name, "ph": "i", "s": "t", "tid": slot + 1, **at})
    return head + sorted(out, key=lambda event: event["ts"])
