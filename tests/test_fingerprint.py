"""The fingerprint of a model in one .gguf file; tests/test_engine_state.py has that of a directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from gguf_files import from_directory

from minivllm.config import ModelConfig
from minivllm.fingerprint import fingerprint
from minivllm.gguf import GGUFFile


def test_the_fingerprint_of_a_gguf_file(path, tmp_path):
    file, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    from_directory(file, path, "llama")
    content = bytearray(file.read_bytes())
    config = ModelConfig.from_dir(file)
    assert fingerprint(file, config) == fingerprint(Path(shutil.copy(file, other)), config)
    tensor = GGUFFile(file).tensors["blk.1.ffn_up.weight"]
    for at in range(tensor.offset, tensor.offset + 4096):
        content[at] ^= 1
    other.write_bytes(content)
    assert fingerprint(file, config) != fingerprint(other, config)
