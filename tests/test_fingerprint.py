"""A model's fingerprint: of one .gguf file, and of files that are not what an engine read any more.

tests/test_engine_state.py has that of a directory.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from engines import assert_empty, greedy, tiny_engine
from gguf_files import from_directory
from tiny import tiny_model

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


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_files_that_changed_under_an_engine_are_not_its_model(path, tmp_path, kind):
    """As where training writes its next checkpoint over the last: the KV is the old one's, the file the new one's."""
    model = Path(shutil.copytree(path, tmp_path / "model"))
    newer = tmp_path / "newer"
    tiny_model(newer, seed=5)
    old, new = model / "model.safetensors", newer / "model.safetensors"
    if kind == "gguf":
        old, new = model / "a.gguf", newer / "a.gguf"
        from_directory(old, path, "llama"), from_directory(new, newer, "llama")
    with tiny_engine(old if kind == "gguf" else model) as engine:
        handle = engine.submit([5, 6, 7], greedy(9))
        engine.step(), engine.step()
        (model / "other.safetensors").write_bytes(b"")  # no part of the model
        handle.save(tmp_path / "before")
    with tiny_engine(old if kind == "gguf" else model) as engine:
        handle = engine.submit([5, 6, 7], greedy(9))
        engine.step(), engine.step()
        os.replace(new, old)
        for call in (lambda: handle.save(tmp_path / "one"), lambda: engine.load(tmp_path / "before")):
            with pytest.raises(ValueError, match="have changed since this engine read them"):
                call()
        assert not (tmp_path / "one").exists()
        assert len(handle.result().token_ids) == 9
        assert_empty(engine)


def test_a_model_named_by_a_relative_path_is_found_from_elsewhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with tiny_engine(Path(path.name)) as engine:
        monkeypatch.chdir(tmp_path)
        handle = engine.submit([5, 6, 7], greedy(9))
        engine.step()
        handle.save("one")
        assert engine.load("one").result().token_ids == handle.result().token_ids
