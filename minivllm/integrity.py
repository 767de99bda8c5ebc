"""The rules between the stores, checked: what `BatchEngine.check_integrity` runs."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.request import IntegrityError
from minivllm.scheduler import Scheduler
from minivllm.sequence import Request
from minivllm.stores import ceil_div


def check(scheduler: Scheduler, requests: Iterable[Request] = ()) -> None:
    """Raise IntegrityError where a rule between the stores is broken."""
    size = scheduler.pool.block_size
    scheduler.pool.check(scheduler.row(slot) for slot in range(scheduler.num_slots))
    queued = set(map(id, scheduler.queue))
    if len(queued) != len(scheduler.queue):
        raise IntegrityError("a sequence stands in the queue twice")
    for slot, sequence in enumerate(scheduler.slots):
        row = scheduler.table[slot]
        count = int(scheduler.num_blocks[slot])
        if (row[:count] < 0).any() or (row[count:] != -1).any():
            raise IntegrityError(f"row {slot} of the block table is not {count} blocks, then -1")
        if sequence is None:
            if count or scheduler.decoding[slot]:
                raise IntegrityError(f"slot {slot} is free but holds blocks or decodes")
            continue
        if sequence.slot != slot or sequence.state != "running" or id(sequence) in queued:
            raise IntegrityError(f"slot {slot} holds a sequence that is elsewhere too")
        written = scheduler.written(sequence)
        if count != ceil_div(written, size):
            raise IntegrityError(f"slot {slot} holds {count} blocks for {written} tokens")
        for i, block in enumerate(scheduler.row(slot)):
            if scheduler.pool.refs[block] > 1 and (i + 1) * size > written:
                raise IntegrityError(f"block {block} is shared and not full")
    if sorted(scheduler.free_slots) != [i for i, s in enumerate(scheduler.slots) if s is None]:
        raise IntegrityError("the list of free slots differs from the slots that are free")
    for sequence in scheduler.queue:
        if sequence.state != "queued" or sequence.slot != -1:
            raise IntegrityError("the queue holds a sequence that is not queued")
    for request in requests:
        for sequence in request.sequences:
            places = (id(sequence) in queued) + (sequence in scheduler.slots) + (sequence.state == "ended")
            if places != 1:
                raise IntegrityError(f"request {request.ordinal} is in {places} of queue, slot, ended")
