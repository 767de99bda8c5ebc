"""Tensors for the tests of the operations: strided, never written, or near a reference."""

from __future__ import annotations

import math

import reference
import torch
from torch import Tensor

NO_BLOCK = 2**31 - 1  # what a careless kernel would follow far outside the cache


def rand(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw on the CPU, so that both devices see the same numbers."""
    return torch.randn(*shape).to(device, dtype)


def apart(x: Tensor) -> Tensor:
    """Return x with NaN between its rows."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), math.nan, dtype=x.dtype, device=x.device)
    wide[:, 8 : 8 + x.shape[1]] = x
    return wide[:, 8 : 8 + x.shape[1]]


def ints(values: list[int] | range, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_near(found: Tensor, truth: Tensor, plain: Tensor) -> None:
    """Allow twice the error of plain torch in found's dtype, and what a chain of float32 sums may lose."""
    assert found.shape == truth.shape
    error = (found.double() - truth).abs().max().item()
    allowed = 2 * (plain.double() - truth).abs().max().item() + 2e-6 * truth.abs().max().item()
    assert error <= allowed, f"error {error:g}, allowed {allowed:g}"


def in_double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


class Pool:
    """A cache full of NaN and a strided table whose unused entries lead far outside it."""

    def __init__(self, device, dtype, seq_lens, num_kv_heads, head_dim, block_size):
        num_blocks = [-(-n // block_size) for n in seq_lens]
        shape = (sum(num_blocks) + 3, 2, num_kv_heads, block_size, head_dim)
        self.cache = torch.full(shape, math.nan, dtype=dtype, device=device)
        table = torch.full((len(seq_lens), 16 + max(num_blocks) + 2), NO_BLOCK, dtype=torch.int32)
        order = torch.randperm(shape[0]).int().split([*num_blocks, 3])
        for slot, blocks in enumerate(order[:-1]):
            table[slot, 16 : 16 + len(blocks)] = blocks
        self.table = table.to(device)[:, 16:]

    def fill(self, slot: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Write random keys and values of a slot's first positions."""
        heads, head_dim = self.cache.shape[2], self.cache.shape[4]
        k, v = (rand(seq_len, heads, head_dim, dtype=self.cache.dtype, device=self.cache.device) for _ in "kv")
        reference.write_kv(self.cache, self.table, slot, 0, k, v)
        return k, v


def angles(head_dim: int, max_position: int, device: torch.device) -> Tensor:
    """Return ``float32[max_position, head_dim]``: cosines, then sines."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    at = torch.arange(max_position, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([at.cos(), at.sin()], dim=-1).float().to(device)
