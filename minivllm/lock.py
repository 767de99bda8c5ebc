"""A lock that serves its waiters in the order they came."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class FairLock:
    """Be held by one thread at a time, again and again by the same one; hand over first come, first served.

    A thread that steps the engine in a loop would otherwise take a plain lock back before a waiting one wakes up.
    An exception while waiting (Ctrl-C) leaves the lock as if the thread had never asked.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiters: deque[tuple[int, threading.Lock]] = deque()

    @property
    def foreign(self) -> bool:
        """Whether this process is a fork of the lock's own: who held it at the fork would hold it for ever."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError in a fork of the lock's own process."""
        if self.foreign:
            raise RuntimeError(
                f"this engine belongs to process {self._pid}, of which this one is a fork: start it by 'spawn' and "
                "make an engine there"
            )

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; without ``blocking`` return False at once where another thread holds it."""
        self.check_process()
        me = threading.get_ident()
        before = self.depth
        try:
            # Without blocking not even for the mutex: the collector may call from inside this very block.
            if not blocking and self._mutex.locked():
                return False
            with self._mutex:
                if self._owner is None or self._owner == me:
                    self._owner = me
                    self._depth += 1
                    return True
                if not blocking:
                    return False
                gate = threading.Lock()
                gate.acquire()
                self._waiters.append((me, gate))
            gate.acquire()
            return True
        except BaseException:
            self.restore(before)
            raise

    @property
    def depth(self) -> int:
        """How often the calling thread holds it."""
        return self._depth if self._owner == threading.get_ident() else 0

    def restore(self, depth: int) -> None:
        """Give up what an interrupted thread asked for or was handed beyond ``depth``."""
        if self.foreign:
            return
        me = threading.get_ident()
        with self._mutex:
            for waiter in [w for w in self._waiters if w[0] == me]:
                self._waiters.remove(waiter)
        while self._owner == me and self._depth > depth:
            self.release()

    def release(self) -> None:
        """Give it up; the longest waiter owns it at once."""
        with self._mutex:
            self._depth -= 1
            if self._depth > 0:
                return
            if self._waiters:
                # No call in between, where an interrupt could come and the waiter be forgotten.
                self._owner, gate = self._waiters[0]
                self._depth = 1
                del self._waiters[0]
                gate.release()
            else:
                self._owner = None

    @contextmanager
    def held(self, blocking: bool = True) -> Iterator[bool]:
        """Hold it in a block, and say whether it is held; an interrupt at any place leaves it as it was before."""
        depth, taken = self.depth, True
        try:
            taken = self.acquire(blocking)
            try:
                yield taken
            finally:
                if taken:
                    self.release()
        finally:
            if taken:  # an interrupt can come just before the lock is given up
                self.restore(depth)

    def __enter__(self) -> FairLock:
        before = self.depth
        try:
            self.acquire()
            return self
        except BaseException:
            self.restore(before)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
