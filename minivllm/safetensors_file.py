"""The header of a .safetensors file, checked, so that its tensors can be read straight to where they belong.

The safetensors library maps files into memory; on a CPU the mapped pages would stand beside the copies
until the last tensor is read. With the offsets at hand plain reads fill the destination directly.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_MAX_HEADER_BYTES = 100_000_000
_LFS_START = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `num_bytes` bytes of `file` from `offset` on, as `shape` of `dtype`."""

    file: Path
    name: str
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype; a ValueError where it is no floating-point type that is served."""
        dtype = _DTYPES.get(self.dtype_name)
        if dtype is None:
            raise ValueError(f"{self.file}: {self.name} has dtype {self.dtype_name}; served are {', '.join(_DTYPES)}")
        return dtype


def refuse_lfs_pointer(file: Path, start: bytes) -> None:
    """Raise where a file is the text that Git LFS leaves in place of content that was not fetched."""
    if start.startswith(_LFS_START):
        raise ValueError(f"{file} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read which tensors a .safetensors file holds.

    Raises
    ------
    ValueError
        On a file that is cut off, a Git LFS pointer, or a header that contradicts itself; it names the file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(64)
        refuse_lfs_pointer(file, start)
        header_bytes = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 0 < header_bytes <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is not a safetensors file ({size} bytes)")
        if 8 + header_bytes > size:
            raise ValueError(f"{file} is cut off: it has {size} bytes, its header alone needs {8 + header_bytes}")
        stream.seek(8)
        raw = stream.read(header_bytes)
    try:
        header = json.loads(raw)
        tensors = {
            name: _tensor(file, name, entry, 8 + header_bytes)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} has a damaged header: {error}") from None
    end = max((t.offset + t.num_bytes for t in tensors.values()), default=8 + header_bytes)
    if end != size:
        state = "is cut off" if end > size else "has bytes that its header does not name"
        raise ValueError(f"{file} {state}: it has {size} bytes, its header says {end}")
    return tensors


def _tensor(file: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    dtype_name = str(entry["dtype"])
    num_bytes = end - begin
    known = _DTYPES.get(dtype_name)
    if begin < 0 or num_bytes < 0 or any(n < 0 for n in shape):
        raise ValueError(f"negative size in {name}")
    if known is not None and num_bytes != math.prod(shape) * known.itemsize:
        raise ValueError(f"{name} has {num_bytes} bytes, which is not {list(shape)} of {dtype_name}")
    return StoredTensor(file, name, dtype_name, shape, data_start + begin, num_bytes)


def read_exactly(descriptor: int, into: memoryview, offset: int) -> None:
    """Fill `into` from a file descriptor's bytes at `offset`; the thread's GIL is free meanwhile."""
    done = 0
    while done < len(into):
        # The kernel reads at most 2 GiB - 4 KiB a call.
        count = os.preadv(descriptor, [into[done : done + (1 << 30)]], offset + done)
        if count == 0:
            raise ValueError(f"the file ended {len(into) - done} bytes early; was it changed while being read?")
        done += count
