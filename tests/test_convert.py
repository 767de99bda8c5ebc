"""A GGUF file converted to a directory: the same model, whole or not at all."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import from_directory
from tiny import tiny_model

from minivllm.config import ModelConfig
from minivllm.convert import convert_gguf
from minivllm.loader import load_weights, stored_tensors
from minivllm.tokenizer import Tokenizer

TEXTS = ["hello there é 漢 👩‍👩‍👧", "<|turn|>a<|end|>", ""]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"), head_dim=32, attention_bias=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_conversion(dtype: str, llama: Path, tmp_path: Path) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama", Kind.Q8_0)
    out = convert_gguf(file, tmp_path / "new" / "model", dtype)
    config, direct = ModelConfig.from_dir(out), ModelConfig.from_dir(file)
    assert config.dtype == getattr(torch, dtype)
    assert config.eos_token_ids == direct.eos_token_ids == (1,)
    ours, theirs = load_weights(out, config), load_weights(file, direct, dtype=dtype)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in stored_tensors(out).values())
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
    converted, described = Tokenizer.load(out), Tokenizer.load(file)
    assert converted is not None and described is not None
    for text in TEXTS:
        assert converted.encode(text) == described.encode(text)
    chat = [{"role": "user", "content": "hi"}]
    assert converted.apply_chat_template(chat) == described.apply_chat_template(chat)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1]
    with pytest.raises(ValueError, match="dtype"):
        convert_gguf(file, tmp_path / "other", "int8")


def test_conversion_that_fails_leaves_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama")
    monkeypatch.setattr(Tokenizer, "save", lambda *_: 1 / 0)
    out = tmp_path / "new" / "model"
    with pytest.raises(ZeroDivisionError):
        convert_gguf(file, out)
    assert list(out.parent.iterdir()) == []


def test_conversions_at_once(llama: Path, tmp_path: Path) -> None:
    file = from_directory(tmp_path / "x.gguf", llama, "llama")
    out = tmp_path / "new" / "model"
    done: list[object] = []

    def work() -> None:
        try:
            done.append(convert_gguf(file, out))
        except BaseException as error:
            done.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [out] * 4
    assert list(out.parent.iterdir()) == [out]
    load_weights(out, ModelConfig.from_dir(out))
