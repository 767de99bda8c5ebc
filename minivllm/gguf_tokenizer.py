"""The tokenizer that a .gguf file's metadata describes, as an object of the tokenizers library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from minivllm.tokenizer import Tokenizer

# Token types of the metadata.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# Tokens that end a turn or a text in the families that are served, whether or not the metadata says so.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>")

# How byte-level vocabularies cut text into words, by the name that the metadata has for it. Contractions,
# letters, digits, punctuation, line ends, spaces; Llama 3 takes up to three digits at once, Qwen 2 one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_PLAIN_NAMES = ("default", "gpt-2")
_SINGLE_DIGIT_NAMES = ("smollm",)

_SPACE = "▁"


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """Build the tokenizer of a model; None where the metadata describes none.

    Raises
    ------
    ValueError
        On a kind of tokenizer, or of pre-tokenizer, that is not served.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none" or "tokenizer.ggml.tokens" not in metadata:
        return None
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, source)
        if add_bos is None:
            add_bos = metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
        add_bos = True if add_bos is None else add_bos
    else:
        raise ValueError(f"{source}: tokenizer kind {kind!r} is not served; served are 'gpt2' and 'llama'")
    _add_tokens(backend, tokens, types)
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    templates = {} if template is None else {"default": str(template)}
    begin = special.get("bos_token") if add_bos else None
    end = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    _put_around(backend, begin, end)
    return Tokenizer(backend, special, templates)


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return every id that ends a text: those the metadata names, then the well-known tokens."""
    ids = [
        metadata[f"tokenizer.ggml.{name}_token_id"]
        for name in ("eos", "eot", "eom")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    ]
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    controls = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL}
    ids += [controls[token] for token in _END_TOKENS if token in controls]
    return list(dict.fromkeys(ids))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # The larger vocabularies hold words that no chain of merges reaches.
    whole_words = pre in _LLAMA3_NAMES
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=whole_words,
    )
    backend = tokenizers.Tokenizer(model)
    if pre in _PLAIN_NAMES:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _SINGLE_DIGIT_NAMES:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _LLAMA3_NAMES or pre in _QWEN2_NAMES:
        pattern = _WORDS % ("{1,3}" if pre in _LLAMA3_NAMES else "")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if pre in _QWEN2_NAMES:
            backend.normalizer = normalizers.NFC()
    else:
        known = ", ".join(_PLAIN_NAMES + _SINGLE_DIGIT_NAMES + _LLAMA3_NAMES + _QWEN2_NAMES)
        raise ValueError(f"{source}: pre-tokenizer {pre!r} is not served; served are {known}")
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    scores: list[float] = metadata["tokenizer.ggml.scores"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=_merges(vocab, tokens, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(vocab: Mapping[str, int], tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Derive BPE merges from the scores of whole pieces: the merge to the better piece comes first."""
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        splits = [
            (vocab[token[:cut]], vocab[token[cut:]])
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        merges += [(score, left, right) for left, right in sorted(splits)]
    # Stable: pieces of one score keep the vocabulary's order.
    merges.sort(key=lambda merge: -merge[0])
    return [(tokens[left], tokens[right]) for _, left, right in merges]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Declare the tokens that are parsed in a text as they stand; they have their ids already."""
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])


def _put_around(backend: tokenizers.Tokenizer, begin: str | None, end: str | None) -> None:
    """Make the tokenizer put these tokens before and after a text."""
    if begin is not None or end is not None:
        before, after = [[token] if token is not None else [] for token in (begin, end)]
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=None,
            special_tokens=[(token, backend.token_to_id(token)) for token in before + after],
        )
