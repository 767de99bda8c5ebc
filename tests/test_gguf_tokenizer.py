"""Tokenizers built from a GGUF file's metadata, against those that the metadata was taken from."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import BYTE_LEVEL, tokenizer_metadata, write
from tiny import byte_level_tokenizer, sentencepiece_tokenizer

from minivllm.gguf_tokenizer import build_tokenizer, end_ids
from minivllm.tokenizer import Tokenizer

TEXTS = [
    "hello there é 漢 👩‍👩‍👧",
    "  two  spaces\n\n\tx ",
    "It's 12345 don't WE'LL 3.14",
    "<|turn|>a<|end|>",
    "",
]


def test_byte_level_tokenizer() -> None:
    ours = build_tokenizer(BYTE_LEVEL, "x")
    theirs = byte_level_tokenizer()
    assert ours is not None
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        for skip in (True, False):
            assert ours.decode(ours.encode(text), skip) == theirs.decode(ours.encode(text), skip_special_tokens=skip)
    assert ours.eos_ids == (1,) and ours.bos_id == 0
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}])[0] == 0


def test_words_of_qwen2_and_llama3() -> None:
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    vocab = {token: i for i, token in enumerate(BYTE_LEVEL["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in BYTE_LEVEL["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    without_begin = BYTE_LEVEL | {"tokenizer.ggml.add_bos_token": False}
    ours = build_tokenizer(without_begin | {"tokenizer.ggml.pre": "qwen2"}, "x")
    assert ours is not None
    for text in [*TEXTS, "e\u0301 \r\n\r\n  x  \n 1234567 ...!? ça va"]:
        words = theirs.pre_tokenizer.pre_tokenize_str(text)
        assert ours._backend.pre_tokenizer.pre_tokenize_str(text) == words
        assert ours._backend.normalizer.normalize_str(text) == theirs.normalizer.normalize_str(text)
    llama3 = build_tokenizer(without_begin | {"tokenizer.ggml.pre": "llama-bpe"}, "x")
    assert llama3 is not None
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    step = json.loads(llama3._backend.to_str())["pre_tokenizer"]["pretokenizers"][0]
    assert step["pattern"] == {"Regex": pattern}


def test_smollm_words_cut_digits() -> None:
    ours = build_tokenizer(BYTE_LEVEL | {"tokenizer.ggml.pre": "smollm"}, "x")
    assert ours is not None
    words = [word for word, _ in ours._backend.pre_tokenizer.pre_tokenize_str("a 123")]
    assert words == ["a", "Ġ", "1", "2", "3"]


def test_sentencepiece_tokenizer() -> None:
    theirs = sentencepiece_tokenizer()
    metadata = tokenizer_metadata(theirs, "llama", ["<s>", "</s>"])
    tokens = metadata["tokenizer.ggml.tokens"]
    merged = [merge.replace(" ", "") for merge in metadata.pop("tokenizer.ggml.merges")]
    metadata |= {
        "tokenizer.ggml.scores": [-float(merged.index(t)) if t in merged else -1e6 for t in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata["tokenizer.ggml.token_type"][0] = 2
    ours = build_tokenizer(metadata, "x")
    assert ours is not None
    for text in [*TEXTS, "the hello Hel the", "olo polol", " a", "<s>the</s> the"]:
        ids = theirs.encode(text).ids
        assert ours._backend.encode(text).ids == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_end_ids() -> None:
    tokens = ["a", "<|eot_id|>", "<|im_end|>", "</s>", "<|endoftext|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 1, 3, 3],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 1,
    }
    assert end_ids(metadata) == [3, 1, 4]  # <|im_end|> is an ordinary token here
    assert end_ids({}) == []


def test_without_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path / "x.gguf", "llama", {}, {"w": np.zeros((1, 1), np.float32)})) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not served; served are .*llama-bpe"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not served"),
    ],
)
def test_tokenizers_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_tokenizer(BYTE_LEVEL | changes, "x")
