"""A submitted request in its caller's hands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.request import Delta, Generation, RequestError

if TYPE_CHECKING:
    from minivllm.calls import Calls
    from minivllm.sequence import Request


class Handle:
    """Follow, read, cancel, fork or save one request.

    Waiting for it drives the engine, together with whatever else is in it. Safe to use from several threads.

    Examples
    --------
    >>> handle = engine.submit("Once upon a time", SamplingParams(max_tokens=4))
    >>> handle.done
    False
    >>> len(handle.result().token_ids)
    4
    """

    def __init__(self, engine: Calls, request: Request) -> None:
        self._engine = engine
        self._request = request

    def __repr__(self) -> str:
        done = "ended" if self.done else "running" if self._request.sequences[0].slot >= 0 else "queued"
        return f"<Handle {self._request.ordinal}: {done}, {self._request.sequences[0].num_output} tokens>"

    @property
    def request_id(self) -> int:
        """The request's number in its engine, from 0."""
        return self._request.ordinal

    @property
    def done(self) -> bool:
        """Whether every sample has ended.

        Examples
        --------
        >>> handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=1))
        >>> handle.done, handle.result().finish_reason, handle.done
        (False, 'length', True)
        """
        return self._request.done

    def result(self) -> Generation:
        """Wait for the end and return the answer.

        Raises
        ------
        RequestError
            The request ended with an error; its ``generation`` holds what there was.

        Examples
        --------
        >>> len(engine.submit([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)).result().token_ids)
        2
        """
        [generation] = self._engine._drive([self._request])
        if generation.error is not None:
            cause = next((s.exception for s in self._request.sequences if s.exception is not None), None)
            raise RequestError(generation.error, generation) from cause
        return generation

    def __iter__(self) -> Iterator[Delta]:
        """Yield what is new, from the beginning, until every sample has ended; of an ended one, after `close` too.

        Examples
        --------
        >>> handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
        >>> sum(len(delta.token_ids) for delta in handle)
        3
        """
        return self._engine._deltas([self._request])

    def cancel(self) -> None:
        """End it, wherever it is, now or with the step that another thread takes; what it has is kept as the result.

        Nothing happens where it has ended.

        Examples
        --------
        >>> handle = engine.submit([1, 2, 3])
        >>> handle.cancel()
        >>> handle.done, handle.result().finish_reason
        (True, 'cancelled')
        """
        self._engine._cancel([self._request])

    def fork(self, k: int = 1) -> list[Handle]:
        """Start ``k`` further samples that go on from the tokens so far, full blocks shared.

        They have the same seed and parameters, and sample numbers of their own: where tokens are drawn at random they
        part ways. Works on sample 0 of a request that has not ended.

        Each branch is a request of its own, with the next free number. Slots show both numbers: forked twice, request 0
        gives ``1.1`` and ``2.2``, which are request 1 with sample 1 and request 2 with sample 2.

        Raises
        ------
        ValueError
            ``k`` below 1, or the request has ended.

        Examples
        --------
        >>> handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        >>> _ = engine.step()
        >>> [branch.result().token_ids == handle.result().token_ids for branch in handle.fork(2)]  # greedy
        [True, True]
        """
        return self._engine._fork(self._request, k)

    def save(self, path: str | Path) -> None:
        """Write tokens, parameters, sampler state and KV to a .safetensors file for `BatchEngine.load`.

        The request goes on here too. A request with a ``logits_fn`` or with ``n`` > 1 cannot be saved, nor one that
        has ended: ValueError. The file names the model by a fingerprint of its config and weights, and the dtype: an
        engine with another model or dtype refuses it. For the fingerprint the model's files are looked at, once; where
        they have changed since the engine read them, that is a ValueError.
        """
        self._engine._save(self._request, Path(path))
