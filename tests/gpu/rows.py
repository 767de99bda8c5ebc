"""Rows and weights on the card, and how rows are compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CUDA = torch.device("cuda")
EPS = 1e-5
BLOCK, DIM = 64, 64


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).to(dtype)


def matrix(n: int, k: int) -> Tensor:
    return random(n, k, scale=k**-0.5)


def near_one(size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (1 + 0.3 * torch.randn(size, device=CUDA)).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare NaN as well."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def assert_rows_near(found: Tensor, truth: Tensor, plain: Tensor, times: float = 2) -> None:
    """Allow each row so many times the error of the path that is not fused, both against float32."""
    assert found.shape == truth.shape == plain.shape
    error, allowed = ((x.float() - truth).flatten(1).norm(dim=1) for x in (found, plain))
    worst = int((error / allowed).nan_to_num(math.inf).argmax())
    assert (error <= times * allowed).all(), f"row {worst}: error {error[worst]:g}, the other's {allowed[worst]:g}"
