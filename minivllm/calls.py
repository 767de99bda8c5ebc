"""What people call: answers, streams, handles. All of it ends in `BatchEngine.step`."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from minivllm import intake, saving
from minivllm.config import ModelConfig
from minivllm.cursor import Cursor
from minivllm.defaults import Sizes
from minivllm.handle import Handle
from minivllm.intake import Params
from minivllm.keywords import explained
from minivllm.lock import FairLock
from minivllm.request import Delta, EngineClosedError, Generation, RequestError, SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.sequence import Request
from minivllm.shown import shown
from minivllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from minivllm.runner import Runner

OnError = Literal["raise", "return"]


class DeltaStream(Iterator[Delta]):
    """Iterate over deltas; closing or dropping it early cancels what is left."""

    def __init__(self, calls: Calls, requests: list[Request]) -> None:
        self._calls, self._requests = calls, requests
        self._deltas = calls._deltas(requests)

    def __next__(self) -> Delta:
        return next(self._deltas)

    def close(self) -> None:
        """Cancel what has not ended; another thread that iterates gets what there was and comes to the end."""
        self._calls._cancel(self._requests)
        with suppress(ValueError):  # that thread is inside the generator
            self._deltas.close()

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Wherever the collector comes by, perhaps inside the engine's own locks: never wait here.
        if not self._calls._lock.foreign:
            self._calls._cancel(self._requests, wait=False)


class Calls:
    """Hold the calls of `BatchEngine`, which has the state and the step."""

    config: ModelConfig
    dtype: torch.dtype
    tokenizer: Tokenizer | None
    sizes: Sizes
    seed: int
    _files: saving.ModelFiles | None = None  # of the model, where it has some
    _closed: bool
    _in_turn: bool
    _next_ordinal: int
    _counts: Counter[str]
    _scheduler: Scheduler
    _runner: Runner
    _inbox: deque[list[Request]]
    _cancelled: deque[Request]
    _lock: FairLock
    _add_lock: threading.Lock

    if TYPE_CHECKING:

        def _turn(self, repair: bool = True) -> AbstractContextManager[None]: ...
        def _step(self) -> list[Request]: ...
        def _take_inbox(self) -> None: ...
        def _collect(self, keep: int) -> None: ...

    @explained
    def generate(
        self,
        prompts: intake.Prompts,
        params: Params = None,
        *,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> list[Generation]:
        """Answer prompts and return the answers in the prompts' order.

        Parameters
        ----------
        prompts : str, list of int, or a list of either
            Texts or token ids. One str, or one list of ints, is one prompt.
        params : SamplingParams or list of SamplingParams, optional
            One for all, or one a prompt.
        on_error : {"raise", "return"}
            With "raise" a bad prompt raises before anything is queued. With "return" its `Generation` carries the error
            and the others run.
        progress : bool
            Show a bar.

        Raises
        ------
        ValueError, TypeError
            An empty prompt, a token id outside the vocabulary, a prompt beyond the length limit, a request that even an
            empty pool could not hold, or as many ``params`` as there are not prompts.
        RequestError
            A request that ended with an error on the way.

        Examples
        --------
        >>> [len(g.token_ids) for g in engine.generate(["a", "b"], SamplingParams(max_tokens=2, ignore_eos=True))]
        [2, 2]
        """
        return self._answer(intake.as_prompts(prompts), params, on_error, progress)

    def chat(
        self,
        conversations: intake.Conversations,
        params: Params = None,
        *,
        on_error: OnError = "raise",
        progress: bool = False,
        **template: Any,
    ) -> list[Generation]:
        """Answer conversations through the model's own chat template; otherwise as `generate`.

        Parameters
        ----------
        conversations : list of dict, or a list of such lists
            Messages ``{"role": …, "content": …}``. One list of messages is one conversation.
        **template
            Further variables for the template. Sampling parameters are none: they go into ``params``, else TypeError.

        Examples
        --------
        >>> [g] = engine.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2, ignore_eos=True))
        >>> len(g.token_ids)
        2
        """
        return self._answer(intake.render(self.tokenizer, conversations, template), params, on_error, progress)

    @explained
    def stream(self, prompts: intake.Prompts, params: Params = None) -> DeltaStream:
        """Yield what is new of each prompt's answer as tokens come; closing the iterator cancels what is left.

        Examples
        --------
        >>> pieces = [delta.text for delta in engine.stream("a", SamplingParams(max_tokens=4))]
        >>> "".join(pieces) == engine.generate("a", SamplingParams(max_tokens=4))[0].text
        True
        """
        return DeltaStream(self, self._add(intake.as_prompts(prompts), params))

    @explained
    def submit(self, prompt: str | Seq[int], params: SamplingParams | None = None) -> Handle:
        """Queue one prompt and return at once, from any thread. See `Handle`.

        Examples
        --------
        >>> engine.submit("a", SamplingParams(max_tokens=3, ignore_eos=True)).result().finish_reason
        'length'
        """
        return Handle(self, self._add([prompt], params)[0])

    def load(self, path: str | Path) -> Handle:
        """Go on with a request that `Handle.save` wrote, from the very token that would have come next.

        Examples
        --------
        >>> handle = engine.submit("a", SamplingParams(max_tokens=8, ignore_eos=True))
        >>> _ = engine.step()
        >>> handle.save(tmp / "one.safetensors")
        >>> engine.load(tmp / "one.safetensors").result().token_ids == handle.result().token_ids
        True
        """
        request = saving.load(self._maker(), Path(path), self._runner.cache.kv, self._origin)
        return Handle(self, self._take_on([request])[0])

    # ---------------------------------------------------------------- behind them

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("an engine owns its memory and its threads' lock: it cannot be copied or pickled")

    @cached_property
    def _origin(self) -> dict[str, str]:
        return saving.origin(self._files, self.config, self.dtype)

    def _maker(self) -> intake.RequestMaker:
        if self._closed:
            raise EngineClosedError("this engine was closed")
        self._lock.check_process()
        return intake.RequestMaker(self.config, self.tokenizer, self.sizes)

    def _commit(self, requests: list[Request]) -> None:
        """Put new requests into the inbox, all or none, with their numbers and seeds."""
        with self._add_lock:
            first = self._next_ordinal
            self._next_ordinal += len(requests)  # before they are used: an interrupt must not give them out twice
            for i, request in enumerate(requests):
                intake.number(request, first + i, self.seed)
            self._counts["requests"] += len(requests)
            self._inbox.append(requests)

    def _add(self, prompts: Seq[Any], params: Params) -> list[Request]:
        make = self._maker()
        return self._take_on([make(p, q, i) for i, (p, q) in enumerate(intake.pair(make.convert(prompts), params))])

    def _take_on(self, requests: list[Request]) -> list[Request]:
        """Commit requests that the caller is to be handed."""
        try:
            self._commit(requests)
            return requests
        except BaseException:  # Ctrl-C: nobody would ever read them
            self._cancel(requests)
            raise

    def _answer(self, prompts: Seq[Any], params: Params, on_error: OnError, progress: bool) -> list[Generation]:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', not {shown(on_error)}")
        make = self._maker()
        made: list[Request | Generation] = []
        for i, (prompt, own) in enumerate(intake.pair(make.convert(prompts), params)):
            try:
                made.append(make(prompt, own, i))
            except (TypeError, ValueError) as error:
                if on_error == "raise":
                    raise
                made.append(intake.failed(prompt, i, error))
        requests = [r for r in made if isinstance(r, Request)]
        try:
            self._commit(requests)
            done = iter(self._drive(requests, progress))
        except BaseException:
            self._cancel(requests)
            raise
        answers = [next(done) if isinstance(r, Request) else r for r in made]
        if on_error == "raise":
            for answer, request in zip(answers, made, strict=True):
                if answer.error is not None and isinstance(request, Request):
                    cause = request.sequences[0].exception
                    raise RequestError(f"prompt {answer.index}: {answer.error}", answer) from cause
        return answers

    def _drive(self, requests: Seq[Request], progress: bool = False) -> list[Generation]:
        """Step until these requests have ended and return their answers."""
        left, answers = deque(requests), dict[Request, Generation | None].fromkeys(requests)
        with intake.progress_bar(requests, progress) as update:
            while left:
                while left and left[0].done:
                    left.popleft()
                if left:  # what ends is made into an answer while the device works on the others
                    answers.update((r, r.to_generation()) for r in self._advance(left[0]) if r in answers)
                if progress:
                    update(sum(r.done for r in requests))
        return [answer or r.to_generation() for r, answer in answers.items()]  # others' steps ended the rest

    def _advance(self, request: Request) -> list[Request]:
        """Take a step for a request that has not ended; return the requests, anybody's, that ended in it.

        What a step raises has ended the requests it concerns, and their callers learn of it there; where it ended none,
        it is raised here, since going on would change nothing.
        """
        failed = self._counts["error"]
        try:
            with self._turn():
                if not request.done:  # another thread's step may have ended it meanwhile
                    return self._step()
        except Exception:
            if not request.done and (self._closed or self._counts["error"] == failed):
                raise
        return []

    def _deltas(self, requests: Seq[Request]) -> Generator[Delta, None, None]:
        cursors = [Cursor(r, s) for r in requests for s in r.sequences]
        while cursors:
            try:
                with self._turn():
                    deltas = [cursor.pull() for cursor in cursors]
            except EngineClosedError:  # nothing changes any more
                deltas = [cursor.pull() for cursor in cursors]
            cursors = [cursor for cursor in cursors if not cursor.finished]
            yield from (delta for delta in deltas if delta is not None)
            waiting = next((r for r in requests if not r.done), None)
            if waiting is not None:
                self._advance(waiting)

    def _cancel(self, requests: Iterable[Request], wait: bool = True) -> None:
        """End requests now, or at the turn's end where a turn is on."""
        left = [r for r in requests if not r.done]
        if left and not self._closed:
            self._cancelled.extend(left)
            self._end_cancelled(wait)

    def _end_cancelled(self, wait: bool) -> None:
        """End what was cancelled. A turn that is on sees to it at its end; ``wait`` is for those who only look."""
        with self._lock.held(blocking=wait and not self._in_turn) as held:
            if held and not self._in_turn and not self._closed:
                with self._turn():
                    self._take_inbox()

    def _fork(self, request: Request, k: int) -> list[Handle]:
        with self._lock.held():
            with self._turn():
                self._take_inbox()
            with self._turn(repair=False):
                forks = intake.fork(request, k)
        return [Handle(self, fork) for fork in self._take_on(forks)]

    def _save(self, request: Request, path: Path) -> None:
        with self._lock.held():
            with self._turn():
                self._take_inbox()
                self._collect(keep=0)
            with self._turn(repair=False):
                sequence = request.sequences[0]
                written = self._scheduler.written(sequence) if sequence.slot >= 0 else 0
                blocks = self._scheduler.row(sequence.slot) if written else []
                saving.save(request, path, self._runner.read_kv(blocks, written) if written else None, self._origin)
