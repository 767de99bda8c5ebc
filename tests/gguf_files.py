"""GGUF files as the usual conversion writes them, by the gguf package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tiny import CHAT_TEMPLATE, byte_level_tokenizer

from minivllm.config import ModelConfig

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Order the rows of each head as files of the llama architecture have them: first half, second half, …"""
    half = weight.shape[0] // num_heads // 2
    heads = weight.reshape(num_heads, 2, half, -1)
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(weight.shape)


def tokenizer_metadata(backend: tokenizers.Tokenizer, model: str, specials: list[str], **more: Any) -> dict[str, Any]:
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in specials else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        **more,
    }


BYTE_LEVEL = tokenizer_metadata(
    byte_level_tokenizer(),
    "gpt2",
    ["<|begin|>", "<|end|>", "<|turn|>", "<|pad|>"],
    **{
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    },
)


def write(file: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write a file; a tensor is an array, or raw blocks with their type."""
    writer = gguf.GGUFWriter(file, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def model_metadata(arch: str, config: ModelConfig, **more: Any) -> dict[str, Any]:
    fields = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_q_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        **more,
    }
    return {f"{arch}.{name}": value for name, value in fields.items()}


def from_directory(file: Path, model: Path, arch: str, kind: Kind = Kind.F32, **more: Any) -> Path:
    """Write what the usual conversion makes of a model: matrices of one type, norms and biases in float32."""
    config = ModelConfig.from_dir(model)
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        array = tensor.float().numpy()
        base, _, suffix = name.rpartition(".")
        if arch == "llama" and "q_proj" in name:
            array = interleaved(array, config.num_q_heads)
        if arch == "llama" and "k_proj" in name:
            array = interleaved(array, config.num_kv_heads)
        if base.startswith("model.layers."):
            _, _, layer, rest = base.split(".", 3)
            base = f"blk.{layer}.{NAMES[rest]}"
        else:
            base = NAMES[base]
        matrix = array.ndim == 2 and kind != Kind.F32
        tensors[f"{base}.{suffix}"] = (gguf.quants.quantize(array, kind), kind) if matrix else array
    return write(file, arch, {**model_metadata(arch, config, **more), **BYTE_LEVEL}, tensors)
