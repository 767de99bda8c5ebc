"""An RMSNorm taken apart, so that it needs no kernel between two products.

The product before gives its rows times the norm's weight, and square sums of the rows; the product after divides
its outputs by the root mean square, which comes to the same: ``(x / rms(x) * g) @ W.T = (x * g) @ W.T / rms(x)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minivllm import _C
else:
    from minivllm import _extension

    _C = _extension.load()

NORM_COLUMNS = 64  # of a square sum, kNormColumns of csrc/kernels.h


class Weighed(NamedTuple):
    """Hold rows times their norm's weight, not yet divided by their root mean square."""

    x: Tensor  # [num_rows, hidden_size], rounded
    square_sums: Tensor  # float32 [num_rows, hidden_size / NORM_COLUMNS], of the rows before the weight


# Rows of hidden states: normed, or their norm half done.
States = Tensor | Weighed


def take_rows(states: States, rows: slice | Tensor) -> States:
    """Return some rows, by a slice or by their indices."""
    if isinstance(states, Weighed):
        return Weighed(_take(states.x, rows), _take(states.square_sums, rows))
    return _take(states, rows)


def _take(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def empty_weighed(rows: Tensor) -> Weighed:
    """Allocate what becomes of ``[num_rows, hidden_size]``."""
    shape = (rows.shape[0], rows.shape[1] // NORM_COLUMNS)
    x = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return Weighed(x, torch.empty(shape, dtype=torch.float32, device=rows.device))


def weigh_rows(residual: Tensor, weight: Tensor, partials: Tensor | None = None, out: Weighed | None = None) -> Weighed:
    """Do the first half of an RMSNorm (https://arxiv.org/abs/1910.07467); for CUDA, in bfloat16 or float16.

    Parameters
    ----------
    residual
        ``[num_rows, hidden_size]``, contiguous; ``hidden_size`` is a multiple of 64, at most 16,384. Written to where
        there are ``partials``.
    weight
        ``[hidden_size]``, the norm's.
    partials
        ``float32[num_partials, num_rows, hidden_size]``, what `Linear.add_to` left: added to ``residual`` first.
    out
        Written to and returned, where given.

    Returns
    -------
    Weighed
        Bitwise what `Linear.add_and_weigh` gives of the same rows.

    Raises
    ------
    ValueError
        A shape, dtype, device or alignment does not fit.
    """
    weighed = empty_weighed(residual) if out is None else out
    _C.weigh_rows(weighed.x, weighed.square_sums, residual, weight, partials)
    return weighed


def embed_and_weigh(
    weight: Tensor,
    norm_weight: Tensor,
    token_ids: Tensor,
    slots: Tensor | None = None,
    last_tokens: Tensor | None = None,
    first: bool = False,
) -> tuple[Tensor, Weighed]:
    """Look tokens up and do the first half of an RMSNorm of their rows; for CUDA, in bfloat16 or float16.

    Parameters
    ----------
    weight, token_ids, slots, last_tokens, first
        As for `minivllm.ops.embedding`; ``hidden_size`` is a multiple of 64, at most 16,384.
    norm_weight
        ``[hidden_size]``.

    Returns
    -------
    tuple of Tensor and Weighed
        ``[num_tokens, hidden_size]`` both: bitwise what `minivllm.ops.embedding` gives, and `weigh_rows` of that.

    Raises
    ------
    ValueError
        A shape, dtype, device or alignment does not fit.
    """
    residual = torch.empty((token_ids.shape[0], weight.shape[1]), dtype=weight.dtype, device=weight.device)
    weighed = empty_weighed(residual)
    _C.embed_and_weigh(
        weighed.x, weighed.square_sums, residual, norm_weight, weight, token_ids, slots, last_tokens, first
    )
    return residual, weighed
