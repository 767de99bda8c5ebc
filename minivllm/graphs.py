"""Decode steps captured as CUDA graphs: one for each size, made when first needed and replayed from then on."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Graphs hold 1, 2, 4, ... rows up to this many, and then multiples of the other.
_POWERS = 128
_STEP = 32

# Of a number of rows and the logits to write, to the tokens drawn: what is captured.
Record = Callable[[int, Tensor], Tensor]


@dataclass
class Graph:
    """Hold a captured step and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    rows: int
    logits: Tensor  # float32 [rows, vocab_size], the same memory for the graphs of all sizes
    tokens: Tensor  # int32 [rows]


class Graphs:
    """Keep the graphs of an engine.

    Parameters
    ----------
    device : torch.device
    max_rows, vocab_size : int
        The shape of the logits, which all graphs share.
    """

    def __init__(self, device: torch.device, max_rows: int, vocab_size: int) -> None:
        self._device, self._max_rows = device, max_rows
        self._logits = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=device)
        self._known: dict[int, Graph | None] = {}  # by rows; None: there was no memory for it
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._warned = False

    def size_of(self, rows: int) -> int:
        """Return the size of the graph that holds this many rows."""
        padded = 1 << (rows - 1).bit_length() if rows < _POWERS else -(-rows // _STEP) * _STEP
        return min(padded, self._max_rows)

    def get(self, rows: int, record: Record) -> Graph | None:
        """Return the graph that holds this many rows; None where the memory for it is missing."""
        size = self.size_of(rows)
        if size not in self._known:
            self._known[size] = self._make(size, record)
        return self._known[size]

    def clear(self) -> None:
        """Forget all graphs and give their memory back. None of them may be running."""
        for graph in self._known.values():
            if graph is not None:
                graph.graph.reset()
        self._known.clear()
        self._pool = None

    def _make(self, rows: int, record: Record) -> Graph | None:
        for again in (True, False):
            try:
                return self._capture(rows, record)
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
            if again:
                # A capture takes memory of its own and cannot free what lies idle outside it.
                gc.collect()
                torch.cuda.empty_cache()
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"there is no memory for a CUDA graph of {rows} rows: such steps are launched kernel by kernel, which "
                "is slower; lower kv_cache_bytes or num_blocks",
                RuntimeWarning,
                stacklevel=2,
            )
        return None

    def _capture(self, rows: int, record: Record) -> Graph:
        graph = torch.cuda.CUDAGraph()
        logits = self._logits[:rows]
        if self._stream is None:
            # Not torch's own, which all graphs of the process share, whatever their device.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        # What torch.cuda.graph does, without its collection of garbage and its return of all idle memory: a pause of a
        # tenth of a second, after which the next prompt has to ask the driver for the memory again.
        with _no_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tokens = record(rows, logits)
            except BaseException:
                with warnings.catch_warnings(), suppress(RuntimeError):  # the first error is the one to tell
                    warnings.simplefilter("ignore")  # that the graph is empty
                    graph.capture_end()
                raise
            graph.capture_end()
        if self._pool is None:
            self._pool = graph.pool()
        return Graph(graph, rows, logits, tokens)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: what it frees on the device would be an error inside a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether it says so; the driver's own, as when a graph is instantiated, is no OutOfMemoryError."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
