"""The walk through a decoder's layers where norms are taken apart: five kernels a layer for few rows.

A norm's first half belongs to the product before it and its second half to the product after it:
`minivllm.split_norm`. For few rows these do it themselves, and the product of queries, keys and values rotates them and
writes keys and values to the cache; for more rows kernels of their own are as fast, until the products have tiles wide
enough to do a norm's first half again. The bits are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm import ops
from minivllm.split_norm import NORM_COLUMNS

if TYPE_CHECKING:
    from minivllm.model import Cache, Inputs, Model
    from minivllm.split_norm import States

_HEAD_DIM = 64  # that a product rotates
_LARGEST_HIDDEN = 16384  # that weigh_rows takes
# Rows up to which the products of q, k and v, of o and of down do what comes between them and the next; past those
# whose sums are left to the next kernel, `Linear.add_and_weigh` knows what o and down had better do.
_ROWS_OF_QKV_JOINED = 48
_ROWS_OF_O_JOINED = 32
_ROWS_OF_DOWN_JOINED = 16


def suits(model: Model) -> bool:
    """Say whether the kernels take the model: bfloat16 on Hopper, heads of 64 without norms of their own."""
    config = model.config
    return (
        model.device.type == "cuda"
        and model.dtype == torch.bfloat16
        and config.head_dim == _HEAD_DIM
        and config.hidden_size % NORM_COLUMNS == 0
        and config.hidden_size <= _LARGEST_HIDDEN
        and all(layer.q_norm is None and layer.k_norm is None for layer in model.layers)
        and all(
            linear.uses_wgmma for layer in model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
    )


def hidden_states(model: Model, inputs: Inputs, cache: Cache, keep_all: bool) -> States:
    """Do what `minivllm.model.Model.forward` does; the last norm's second half is left to a head that can do it."""
    eps, layers = model.config.rms_norm_eps, model.layers
    residual, rows = ops.embed_and_weigh(
        model.embed, layers[0].input_norm, inputs.token_ids, inputs.slots, cache.last_tokens, inputs.first
    )
    norms = [*(layer.input_norm for layer in layers[1:]), model.norm]  # after each layer
    for i, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        q = _queries(model, layer.qkv, rows, inputs, cache, i)
        x, residual = model.attend(q, residual, inputs, cache, i, keep_all)
        rows = _add_and_weigh(layer.o, residual, x.flatten(1), layer.post_norm, _ROWS_OF_O_JOINED)
        x = layer.gate_up(rows.x, square_sums=rows.square_sums, eps=eps)
        if norm is model.norm and not model.lm_head.uses_wgmma:  # a vocabulary that is no multiple of 8
            return ops.rms_norm(residual, norm, eps, partials=layer.down.add_to(residual, x))
        rows = _add_and_weigh(layer.down, residual, x, norm, _ROWS_OF_DOWN_JOINED)
    return rows


def _queries(model: Model, qkv: ops.Linear, rows: ops.Weighed, inputs: Inputs, cache: Cache, i: int) -> Tensor:
    """Return the rotated queries; keys and values are in layer i's cache then."""
    eps, heads = model.config.rms_norm_eps, model.config.num_q_heads
    where = (model.cos_sin, inputs.positions, inputs.slots, cache.block_table, cache.kv[i])
    if rows.x.shape[0] <= _ROWS_OF_QKV_JOINED:
        return qkv.rope_kv(rows, eps, *where, settled=True)
    if qkv.leaves_sums(rows.x):
        sums = qkv.begin(rows.x)
        return ops.rope_kv(sums, *where, heads, eps=eps, square_sums=rows.square_sums, settled=True)
    return ops.rope_kv(qkv(rows.x, square_sums=rows.square_sums, eps=eps), *where, heads, settled=True)


def _add_and_weigh(product: ops.Linear, residual: Tensor, x: Tensor, norm: Tensor, joined: int) -> ops.Weighed:
    many = product.num_chunks > 1 and not product.leaves_sums(x)
    if many or x.shape[0] <= joined:
        return product.add_and_weigh(residual, x, norm)
    return ops.weigh_rows(residual, norm, partials=product.add_to(residual, x))
