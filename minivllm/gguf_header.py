"""The header of a .gguf file: its metadata, and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.safetensors_file import refuse_lfs_pointer

# Values of the metadata by their type number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor: `shape` with the rows first, `type_id` as ggml numbers types, `offset` in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def read_gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Read the metadata and the tensors, by name, of a .gguf file.

    Raises
    ------
    ValueError
        When it is not a GGUF file of version 2 or 3, or is cut off.
    """
    with path.open("rb") as stream:
        start = stream.read(64)
        refuse_lfs_pointer(path, start)
        if start[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cursor = _Cursor(content)
            try:
                cursor.skip(4)
                version = cursor.scalar("I")
                if version in (2, 3):
                    return _read(cursor)
            except (struct.error, UnicodeDecodeError, KeyError, RecursionError) as error:
                raise ValueError(f"{path} is cut off or damaged: {error}") from None
    raise ValueError(f"{path} has GGUF version {version}; served are 2 and 3")


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
        entries.append((name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise struct.error(f"general.alignment is {alignment!r:.80}")
    data = -(-cursor.at // alignment) * alignment
    return metadata, {name: GGUFTensor(name, shape, kind, data + at) for name, shape, kind, at in entries}


class _Cursor:
    """Reads little-endian values off a buffer."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.at = 0

    def skip(self, num_bytes: int) -> None:
        self.at += num_bytes

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self._content, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self._content[self.at : self.at + length]
        if len(raw) < length:
            raise struct.error("a string ends after the file")
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        form = f"<{count}{_SCALARS[inner]}"
        values = list(struct.unpack_from(form, self._content, self.at))
        self.at += struct.calcsize(form)
        return values
