"""An engine for asyncio: one thread steps it while there is work, and coroutines wait for what comes out."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from minivllm import intake
from minivllm.calls import OnError
from minivllm.cursor import Cursor
from minivllm.engine import BatchEngine
from minivllm.intake import Params
from minivllm.request import Delta, EngineClosedError, Generation, Logprobs, RequestError, SamplingParams
from minivllm.sequence import Request
from minivllm.shown import shown

logger = logging.getLogger("minivllm")


class _Watch:
    """Follow the requests of one call; pulled by the engine's thread, read on the caller's event loop."""

    def __init__(self, requests: list[Request], deltas: bool) -> None:
        self.requests = requests
        self.loop = asyncio.get_running_loop()
        self.cursors = [Cursor(r, s) for r in requests for s in r.sequences] if deltas else []
        # On the loop alone: what has come, and who waits for it.
        self.inbox: deque[Delta] = deque()
        self.done = False
        self.changed = asyncio.Event()

    def pull(self) -> tuple[list[Delta], bool]:
        """Return what is new, and whether that is all; the engine's lock is held."""
        done = all(r.done for r in self.requests)
        deltas = [delta for delta in (cursor.pull() for cursor in self.cursors) if delta is not None]
        self.cursors = [cursor for cursor in self.cursors if not cursor.finished]
        return deltas, done

    def take(self, deltas: list[Delta], done: bool) -> None:
        """Receive what the thread pulled."""
        self.inbox += deltas
        self.done = self.done or done
        self.changed.set()


def _deliver(items: list[tuple[_Watch, list[Delta], bool]]) -> None:
    for watch, deltas, done in items:
        watch.take(deltas, done)


def _reach(loop: asyncio.AbstractEventLoop, items: list[tuple[_Watch, list[Delta], bool]]) -> bool:
    """Send news to a loop; False where it was closed."""
    try:
        loop.call_soon_threadsafe(_deliver, items)
    except RuntimeError:
        return False
    return True


def _same_sample(a: Delta, b: Delta) -> bool:
    return (a.index, a.sample) == (b.index, b.sample)


class AsyncHandle(AsyncIterator[Delta]):
    """Be one call on its way: an async iterator of deltas, and the answers once they have ended.

    Closing it, dropping it, or cancelling the task that waits on it cancels what has not ended.
    """

    def __init__(self, engine: AsyncEngine, watch: _Watch) -> None:
        self._engine, self._watch = engine, watch

    async def __anext__(self) -> Delta:
        watch = self._watch
        while not watch.inbox:
            if watch.done:
                raise StopAsyncIteration
            await self._change()
        first = watch.inbox.popleft()
        if not watch.inbox or not _same_sample(first, watch.inbox[0]):
            return first
        # A reader that is slower than the engine gets fewer, longer deltas, and catches up.
        parts = [first]
        while watch.inbox and _same_sample(first, watch.inbox[0]):
            parts.append(watch.inbox.popleft())
        return replace(
            parts[-1],
            text="".join(part.text for part in parts),
            token_ids=[token for part in parts for token in part.token_ids],
        )

    async def result(self) -> list[Generation]:
        """Wait for the end and return the answers in the prompts' order, those with an error included."""
        while not self._watch.done:
            await self._change()
        return [request.to_generation() for request in self._watch.requests]

    async def _change(self) -> None:
        self._watch.changed.clear()
        try:
            await self._watch.changed.wait()
        except BaseException:
            self.cancel()
            raise

    @property
    def requests(self) -> list[Request]:
        """The requests, one a prompt."""
        return self._watch.requests

    def logprobs(self, index: int, sample: int, start: int, stop: int) -> Logprobs:
        """Return the log probabilities of some of a sample's tokens, as far as they have come."""
        return (self._watch.requests[index].sequences[sample].logprobs or [])[start:stop]

    def cancel(self) -> None:
        """End what has not ended; what there is of it stays the result."""
        self._engine._cancel(self._watch)

    async def aclose(self) -> None:
        """Cancel what has not ended."""
        self.cancel()

    def __del__(self) -> None:
        # Wherever the collector comes by, perhaps inside the engine's own locks: never wait here.
        if not self._watch.done:
            self._engine._cancel(self._watch, wait=False)


class AsyncEngine:
    """Drive a `BatchEngine` from a thread of its own, for asyncio.

    Parameters
    ----------
    engine : BatchEngine
        Closed with this one. Other threads may go on using it.

    Examples
    --------
    ::

        async with AsyncEngine(BatchEngine(model)) as engine:
            async for delta in engine.stream("Once upon a time", SamplingParams(max_tokens=64)):
                print(delta.text, end="", flush=True)
            answers = await engine.generate(["a", "b"])
    """

    def __init__(self, engine: BatchEngine) -> None:
        self.engine = engine
        self.on_end: Callable[[Generation], None] | None = None  # called in the thread, once a request
        self._watches: list[_Watch] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # ---------------------------------------------------------------- calls

    def submit(self, prompts: intake.Prompts, params: Params = None, *, deltas: bool = True) -> AsyncHandle:
        """Queue prompts and return at once; call it on the event loop that will wait for them.

        Without ``deltas`` there is only the result to wait for, and nothing is done at each token.

        Raises
        ------
        ValueError, TypeError
            As `BatchEngine.generate`; nothing was queued.
        EngineClosedError
            After `close`.
        """
        asyncio.get_running_loop()  # where there is none, it says so before anything is queued
        if self._closing:
            raise EngineClosedError("this engine was closed")
        watch = _Watch(self.engine._add(intake.as_prompts(prompts), params), deltas)
        with self._wake:
            if self._closing:  # meanwhile: the thread will not look again
                raise EngineClosedError("this engine was closed")
            self._watches.append(watch)
            self._wake.notify()
        return AsyncHandle(self, watch)

    def stream(self, prompts: intake.Prompts, params: Params = None) -> AsyncHandle:
        """Iterate over what is new of each prompt's answer as tokens come: ``async for delta in …``."""
        return self.submit(prompts, params)

    async def generate(
        self, prompts: intake.Prompts, params: Params = None, *, on_error: OnError = "raise"
    ) -> list[Generation]:
        """Answer prompts, in the prompts' order; cancelling the task cancels the requests.

        Raises
        ------
        RequestError
            With ``on_error="raise"``, a request that ended with an error.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', not {shown(on_error)}")
        listed = intake.as_prompts(prompts)
        if on_error == "raise":
            answers = await self.submit(listed, params, deltas=False).result()
            for answer in answers:
                if answer.error is not None:
                    raise RequestError(f"prompt {answer.index}: {answer.error}", answer)
            return answers
        pairs = intake.pair(listed, params)
        found = {i: refused for i, pair in enumerate(pairs) if (refused := self._refusal(i, *pair)) is not None}
        good = [i for i in range(len(pairs)) if i not in found]
        if good:
            handle = self.submit([pairs[i][0] for i in good], [pairs[i][1] for i in good], deltas=False)
            for i, request in zip(good, handle.requests, strict=True):
                request.index = i
            found.update(zip(good, await handle.result(), strict=True))
        return [found[i] for i in range(len(pairs))]

    def _refusal(self, index: int, prompt: Any, params: SamplingParams) -> Generation | None:
        """Return the answer to a prompt that cannot be served, None for one that can."""
        make = self.engine._maker()
        try:
            make(prompt, params, index)
        except (TypeError, ValueError) as error:
            return intake.failed(prompt, index, error)
        return None

    async def chat(
        self, conversations: intake.Conversations, params: Params = None, *, on_error: OnError = "raise"
    ) -> list[Generation]:
        """Answer conversations through the model's own chat template; otherwise as `generate`."""
        prompts = intake.render(self.engine.tokenizer, conversations, {})
        return await self.generate(prompts, params, on_error=on_error)

    # ---------------------------------------------------------------- looking at it

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._closing

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot; read without the engine's lock, so it may be a step old."""
        inbox = sum(len(r.sequences) for requests in list(self.engine._inbox) for r in requests)
        return len(self.engine._scheduler.queue) + inbox

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody owns; read without the engine's lock, so it may be a step old."""
        return len(self.engine._scheduler.free_slots)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while self._wait_for_work():
            failed = self.engine._counts["error"]
            try:
                with self.engine._turn():
                    self.engine._step()
            except EngineClosedError:
                break
            except Exception as error:  # the thread outlives whatever a step raises
                logger.exception("a step failed")
                if self.engine._counts["error"] == failed:  # nobody was told, and the next step would be the same
                    self._fail_all(error)
            self._publish()
        self.engine.close()
        self._publish()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        engine = self.engine
        with self._wake:
            while not (self._closing or self._watches or engine._requests or engine._inbox or engine._cancelled):
                self._wake.wait()
            return not self._closing

    def _fail_all(self, error: Exception) -> None:
        """End every request with the error."""
        engine = self.engine
        try:
            with engine._turn():
                engine._take_inbox()
                for request in list(engine._requests.values()):
                    for sequence in request.sequences:
                        engine._end(sequence, "error", error=f"{type(error).__name__}: {error}", cause=error)
        except Exception:
            logger.exception("requests could not be ended")

    def _publish(self) -> None:
        """Send each event loop what is new of its calls, in one go."""
        with self._wake:
            watches = list(self._watches)
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Watch, list[Delta], bool]]] = {}
        ended: list[_Watch] = []
        with self.engine._lock.held():
            for watch in watches:
                deltas, done = watch.pull()
                if deltas or done:
                    news.setdefault(watch.loop, []).append((watch, deltas, done))
                if done:
                    ended.append(watch)
        for request in (r for watch in ended for r in watch.requests):
            try:
                if self.on_end is not None:
                    self.on_end(request.to_generation())
            except Exception:  # a listener's: those who wait for answers get them
                logger.exception("on_end failed")
        for loop, items in news.items():
            if not _reach(loop, items):  # nobody waits there any more
                lost = [watch for watch, _, done in items if not done]
                self.engine._cancel(r for watch in lost for r in watch.requests)
                ended += lost
        if ended:
            gone = {id(watch) for watch in ended}
            with self._wake:
                self._watches = [watch for watch in self._watches if id(watch) not in gone]

    def _cancel(self, watch: _Watch, wait: bool = True) -> None:
        self.engine._cancel(watch.requests, wait)
        with self._wake:
            self._wake.notify()

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Cancel what is left, end the thread and close the engine. A second call does nothing."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.to_thread(self.close)
