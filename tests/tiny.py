"""Tiny random models and tokenizers in the Hugging Face layout; transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ["<|begin|>", "<|end|>", "<|turn|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "What is the capital of France? Paris is the capital.",
    "one two three four five, hello world and hello there",
]
VOCAB_SIZE = 320


def byte_level_tokenizer(vocab_size: int = VOCAB_SIZE, add_bos: bool = True) -> tokenizers.Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` tokens; it begins a text with <|begin|> (id 0)."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[0]} $A", pair=None, special_tokens=[(SPECIALS[0], 0)]
        )
    return tokenizer


def sentencepiece_tokenizer() -> tokenizers.Tokenizer:
    """Make a BPE such as SentencePiece models become: ▁ for spaces, bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyzH.,", "▁a", "▁t", "he", "▁the", "lo", "Hel", "He", "ol"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "o"), ("H", "e"), ("He", "l"), ("o", "l")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in pieces[:3]])
    return tokenizer


def save_tokenizer(directory: Path, backend: tokenizers.Tokenizer | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json, with a chat template that begins with <|begin|>."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend or byte_level_tokenizer(),
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[1],
        pad_token=SPECIALS[3],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


def tiny_model(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokenizer: bool = True,
    max_shard_size: str = "50GB",
    **config: Any,
) -> Path:
    """Write a model of two layers, hidden size 64 and 4/2 heads, with random weights.

    Parameters
    ----------
    directory
        Where to; returned.
    architecture
        As config.json names it.
    tokenizer
        Whether to write one beside it, of 320 tokens; ids 0 and 1 begin and end a text.
    max_shard_size
        Of the safetensors files; small values give an index.
    config
        Fields that differ from the usual ones, by the names that transformers has.
    """
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if architecture == "MistralForCausalLM":
        fields["sliding_window"] = None
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    model = getattr(transformers, architecture)(config_class(**fields | config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            # Norm weights about 1, biases small, products about as large as what goes in: every weight
            # matters, and the most likely token is clearly so.
            if parameter.dim() == 2:
                parameter.copy_(values * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(values * 0.1 + (1.0 if parameter.mean() > 0.5 else 0.0))
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        save_tokenizer(directory)
    return directory
