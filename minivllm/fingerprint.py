"""Which model it is: a hash of the numbers of its config and of samples of its weights."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from minivllm.config import ModelConfig
from minivllm.loader import expected_tensors, stored_tensors

# What a step's numbers do not follow from is left out: end tokens, the length limit.
_FIELDS = (
    "architecture",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "rope",
    "tie_word_embeddings",
    "qkv_bias",
    "o_bias",
    "qk_norm",
)
_SAMPLE_BYTES = 64
_SAMPLES_A_TENSOR = 4
_SAMPLES_A_GGUF_FILE = 2048


def fingerprint(path: Path, config: ModelConfig) -> str:
    """Return a model's fingerprint: the same for a copy of its files, whichever shards its tensors lie in.

    Every tensor of a directory is sampled, so that models differ which share all but some weights; a .gguf file is
    sampled as a whole, at places evenly spaced. Some kilobytes are read: it takes milliseconds where the files are in
    memory.

    Raises
    ------
    FileNotFoundError, ValueError
        The files at ``path`` are not there any more, or are no such model.
    """
    found = hashlib.sha256(repr([(name, getattr(config, name)) for name in _FIELDS]).encode())
    with ExitStack() as stack:
        if path.is_file():  # .gguf: its header holds the whole vocabulary, which takes long to parse
            size = path.stat().st_size
            found.update(str(size).encode())
            stream = stack.enter_context(path.open("rb", buffering=0))
            found.update(_samples(stream, 0, size, _SAMPLES_A_GGUF_FILE))
            return found.hexdigest()
        stored = stored_tensors(path)
        streams: dict[Path, FileIO] = {}
        for name in sorted(expected_tensors(config)):
            if name not in stored:
                raise ValueError(f"{path} holds no {name} any more")
            tensor = stored[name]
            if tensor.file not in streams:
                streams[tensor.file] = stack.enter_context(tensor.file.open("rb", buffering=0))
            found.update(repr((name, tensor.dtype_name, tensor.shape)).encode())
            found.update(_samples(streams[tensor.file], tensor.offset, tensor.num_bytes, _SAMPLES_A_TENSOR))
    return found.hexdigest()


def _samples(stream: FileIO, offset: int, num_bytes: int, count: int) -> bytes:
    """Return some bytes of a file's part from its beginning, its end and places between them, evenly spaced."""
    last = max(num_bytes - _SAMPLE_BYTES, 0)
    size = min(num_bytes, _SAMPLE_BYTES)
    places = (offset + last * i // (count - 1) for i in range(count))
    return b"".join(os.pread(stream.fileno(), size, place) for place in places)
