"""Texts that tokenizers get wrong, and tokenizers of each kind that there is."""

from __future__ import annotations

import tokenizers
from tiny import CHAT_TEMPLATE, byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from minivllm.tokenizer import Detokenizer, Tokenizer

TEXTS = [
    "a👩‍👩‍👧 é 漢",
    "hello there, the quick  brown fox",
    "  leading and trailing  ",
    "line\r\n\tbreaks\n\n",
    "What is 2+2? it's 1234567.",
    "日本語 😀 한국어",
    "<|turn|>user\nhi<|end|>\n",
    "a\u0301 \u200d \ufffd",
    "",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France? 😀"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "  And <|end|> of Spain?\n"},
]


def byte_level() -> Tokenizer:
    specials = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return Tokenizer(byte_level_tokenizer(), specials, {"default": CHAT_TEMPLATE})


def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"})


def word_pieces() -> Tokenizer:
    """A decoder that is neither of the two that are common: pieces joined by the vocabulary's own marks."""
    words = ["[UNK]", "[CLS]", "hel", "##lo", "the", "##re", "漢", "é", ".", "it", "##s"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[CLS]"])
    return Tokenizer(backend)


def metaspace() -> Tokenizer:
    """Spaces as ▁, and no bytes to fall back on."""
    pieces = ["<unk>", "</s>", "▁", "▁▁", "▁hello", "▁the", "re", "漢", "é", "▁.", "h", "e", "l", "o", "t", "r"]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


TOKENIZERS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(),
    "word pieces": word_pieces(),
    "metaspace": metaspace(),
}


def stream(tokenizer: Tokenizer, pushes: list[list[int]], skip: bool) -> str:
    """Join the pieces of the text that the ids stream as."""
    streaming = Detokenizer(tokenizer, skip)
    pieces = [streaming.push(ids) for ids in pushes]
    return "".join(pieces) + streaming.flush()
