"""Bytes of files into tensors: straight on the CPU, through two pinned buffers to a GPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from minivllm.safetensors_file import StoredTensor, read_exactly

# Two of these are in flight: one is filled from the file while the other goes to the device.
_BUFFER_BYTES = 64 << 20
# One thread copies some 5 GB/s out of the page cache, less than the link to a GPU takes.
_READ_THREADS = 4


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as its bytes, uint8 ``[num_bytes]``."""
    return tensor.reshape(-1).view(torch.uint8)


class FileReader:
    """Fills tensors from files; use it as a context manager, at whose end all copies have arrived.

    Parameters
    ----------
    device
        Where the tensors to fill are.
    buffer_bytes
        Size of each of the two staging buffers. Not used where a CPU tensor has the file's own dtype.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._buffers: list[Tensor] = []
        self._arrived: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._files: dict[Path, int] = {}
        self._pool = ThreadPoolExecutor(_READ_THREADS)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        if self._device.type == "cuda":
            # The buffers must outlive the copies from them, also when an error ends the loading.
            torch.cuda.current_stream(self._device).synchronize()
        self._buffers.clear()

    def read(self, stored: StoredTensor, into: Tensor) -> None:
        """Fill `into` (contiguous, same number of elements) from a file, converting to its dtype."""
        descriptor = self._open(stored.file)
        try:
            if into.device.type == "cpu" and into.dtype == stored.dtype:
                self._fill(descriptor, _bytes_of(into).numpy().data, stored.offset)
            else:
                self._read_staged(descriptor, stored, into.view(-1))
        except ValueError as error:
            raise ValueError(f"{stored.file}: {stored.name}: {error}") from None

    def _read_staged(self, descriptor: int, stored: StoredTensor, into: Tensor) -> None:
        item = stored.dtype.itemsize
        at_once = max(self._buffer_bytes // item, 1)
        for start in range(0, into.numel(), at_once):
            stop = min(start + at_once, into.numel())
            buffer = self._next_buffer()[: (stop - start) * item]
            self._fill(descriptor, buffer.numpy().data, stored.offset + start * item)
            piece = buffer.view(stored.dtype)
            if self._device.type == "cuda" and into.dtype != stored.dtype:
                # Converted there: less to do for the host, and the copy stays asynchronous.
                piece = piece.to(self._device, non_blocking=True)
            into[start:stop].copy_(piece, non_blocking=True)
            if self._device.type == "cuda":
                self._arrived[self._turn] = torch.cuda.current_stream(self._device).record_event()
            self._turn = 1 - self._turn

    def _fill(self, descriptor: int, into: memoryview, offset: int) -> None:
        share = -(-len(into) // _READ_THREADS)
        if share < 1 << 20:
            read_exactly(descriptor, into, offset)
            return
        jobs = [
            self._pool.submit(read_exactly, descriptor, into[start : start + share], offset + start)
            for start in range(0, len(into), share)
        ]
        for job in jobs:
            job.result()

    def _next_buffer(self) -> Tensor:
        if not self._buffers:
            pin = self._device.type == "cuda"
            self._buffers = [torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        event = self._arrived[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn]

    def _open(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        return self._files[file]
