"""A turn: what holds an engine while its stores change, and mends them when an exception cuts the change short."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from minivllm.lock import FairLock
from minivllm.request import EngineClosedError, FinishReason
from minivllm.scheduler import Scheduler
from minivllm.sequence import Request, Sequence

if TYPE_CHECKING:
    from minivllm.runner import Runner
    from minivllm.ticket import Ticket


class Turns:
    """Hold the turns of `BatchEngine`, which has the state and the step."""

    _closed: bool
    _in_turn: bool
    _half_done: bool
    _scheduler: Scheduler
    _runner: Runner
    _requests: dict[int, Request]
    _cancelled: deque[Request]
    _tickets: deque[Ticket]
    _ended: list[Request]
    _lock: FairLock

    if TYPE_CHECKING:

        def _end(
            self,
            sequence: Sequence,
            reason: FinishReason,
            stop_reason: int | str | None = None,
            error: str | None = None,
            cause: BaseException | None = None,
        ) -> None: ...
        def _end_cancelled(self, wait: bool) -> None: ...

    @contextmanager
    def _turn(self, repair: bool = True) -> Iterator[None]:
        """Hold the engine; whatever exception leaves it, Ctrl-C included, leaves it sound.

        Without ``repair`` an Exception means that the caller was refused before anything changed: others go on.
        """
        try:
            with self._lock.held():
                if self._closed:
                    raise EngineClosedError("this engine was closed")
                if self._in_turn:
                    raise RuntimeError("the engine cannot be driven from inside one of its own steps (a logits_fn)")
                self._in_turn = True
                try:
                    if self._half_done:
                        self._recover(None)
                    self._half_done = True
                    yield
                    self._half_done = False
                except BaseException as error:
                    if repair or not isinstance(error, Exception):
                        self._recover(error)
                    self._half_done = False
                    raise
                finally:
                    self._in_turn = False
        finally:
            if self._cancelled and not self._half_done:  # by a thread that did not wait; a failed repair comes first
                self._end_cancelled(wait=False)

    def _recover(self, error: BaseException | None) -> None:
        """Free every slot and block. Sequences in slots end with an Exception; after an interrupt they wait again."""
        self._tickets.clear()
        self._runner.drain()
        running = [s for r in self._requests.values() for s in r.sequences if s.state == "running"]
        self._scheduler.rebuild(self._requests.values())
        if isinstance(error, Exception):
            for sequence in running:
                self._end(sequence, "error", error=f"{type(error).__name__}: {error}", cause=error)
        for sequence in list(self._scheduler.queue):
            stop, end = sequence.rebuild_text(), sequence.end_of_tokens()
            if stop is not None or end is not None:
                self._end(sequence, *(end or ("stop", stop)))
        for request in [r for r in self._requests.values() if r.done]:  # whose end was cut short
            del self._requests[request.ordinal]
            self._ended.append(request)
        self._half_done = False
