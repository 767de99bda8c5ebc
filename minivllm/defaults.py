"""The sizes an engine takes where its caller names none."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from minivllm.config import ModelConfig
from minivllm.shown import shown

_MOST = (2**31 - 1, 2**63 - 1)  # of a count, which is an int32 on the device, and of bytes


@dataclass(frozen=True)
class Sizes:
    """Hold an engine's sizes, all decided."""

    num_slots: int
    block_size: int
    num_blocks: int
    max_seq_len: int
    max_step_tokens: int


def _positive(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int or None, not {shown(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {shown(value)}")
    if value > _MOST[name == "kv_cache_bytes"]:
        raise ValueError(f"{name} must be at most {_MOST[name == 'kv_cache_bytes']}, not {shown(value)}")
    return int(value)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on the device (the CPU: that the system could give)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_head_dim(head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a head_dim that attention has no kernel for; the launchers would, but only at the first step."""
    if device.type == "cuda" and dtype != torch.float32:
        served, which = head_dim in (16, 32, 64, 80, 96, 128), "16, 32, 64, 80, 96 and 128"
    else:
        served, which = head_dim <= 256 and head_dim % 8 == 0, "multiples of 8 up to 256"
    if not served:
        raise ValueError(f"head_dim {head_dim} is not served on {device.type} in {dtype}, only {which}")


def _check_memory(sizes: Sizes, config: ModelConfig, dtype: torch.dtype, kv_cache_bytes: int | None) -> None:
    """Refuse what no moment of this machine could hold; the system would grant it and end the process later."""
    rows = -(-sizes.max_seq_len // sizes.block_size)
    wanted = {
        "block_size": sizes.block_size * config.kv_bytes_per_token(dtype),
        "num_blocks": sizes.num_blocks * sizes.block_size * config.kv_bytes_per_token(dtype),
        "num_slots": 4 * sizes.num_slots * (config.vocab_size + 4 * rows),
        "max_seq_len": 4 * sizes.max_seq_len * config.head_dim,
        "max_step_tokens": 4 * sizes.max_step_tokens * config.hidden_size,
    }
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name, size in wanted.items():
        if size > there:
            value = getattr(sizes, name)
            if name == "num_blocks" and kv_cache_bytes is not None:  # which they follow from
                name, value = "kv_cache_bytes", kv_cache_bytes
            raise ValueError(f"{name} = {value} takes {size} bytes or more, and this machine has {there}: lower it")


def choose_sizes(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_slots: int | None,
    block_size: int | None,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    max_seq_len: int | None,
    max_step_tokens: int | None,
) -> Sizes:
    """Fill in what was not given, fitted to the device; see `BatchEngine` for the defaults.

    Raises
    ------
    ValueError
        A size below 1, both ``num_blocks`` and ``kv_cache_bytes``, a ``max_seq_len`` beyond the model's, a cache that
        holds no block, a head_dim without a kernel, or, on the CPU, more memory than the machine has.
    """
    _check_head_dim(config.head_dim, device, dtype)
    gpu = device.type == "cuda"
    slots = _positive("num_slots", num_slots, 256 if gpu else 8)
    block = _positive("block_size", block_size, 64 if gpu else 16)
    length = _positive("max_seq_len", max_seq_len, config.max_seq_len)
    if length > config.max_seq_len:
        raise ValueError(f"max_seq_len {length} is beyond the model's limit of {config.max_seq_len} tokens")
    if length < 2:
        raise ValueError("max_seq_len must be at least 2: a token of the prompt and one of the answer")
    step = _positive("max_step_tokens", max_step_tokens, 8192 if gpu else 512)
    if num_blocks is not None and kv_cache_bytes is not None:
        raise ValueError("num_blocks and kv_cache_bytes both say how large the KV cache is: give one")
    block_bytes = block * config.kv_bytes_per_token(dtype)
    if kv_cache_bytes is not None:
        blocks = _positive("kv_cache_bytes", kv_cache_bytes, 0) // block_bytes
        if blocks == 0:
            raise ValueError(f"kv_cache_bytes {kv_cache_bytes} holds no block: one takes {block_bytes} bytes")
    elif num_blocks is not None:
        blocks = _positive("num_blocks", num_blocks, 0)
    else:
        tokens = slots * min(length, 8192 if gpu else 2048)
        share = free_memory(device) // (2 if gpu else 4)
        blocks = max(min(-(-tokens // block), share // block_bytes), 1)
    if blocks > _MOST[0]:
        raise ValueError(f"kv_cache_bytes {kv_cache_bytes} holds {blocks} blocks; at most {_MOST[0]} are served")
    sizes = Sizes(slots, block, blocks, length, step)
    if not gpu:
        _check_memory(sizes, config, dtype, kv_cache_bytes)
    return sizes
