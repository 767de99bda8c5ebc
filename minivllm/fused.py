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
    return _Walk(model, inputs, cache).run(keep_all)


class _Walk:
    """One pass through the layers.

    What a layer leaves for the next kernel lies where the layer before had it. An allocation takes the host as long as
    a launch, and those who read what is written over have ended by then.
    """

    def __init__(self, model: Model, inputs: Inputs, cache: Cache) -> None:
        self.model, self.inputs, self.cache = model, inputs, cache
        self.eps = model.config.rms_norm_eps
        self.residual, self.rows = ops.embed_and_weigh(
            model.embed, model.layers[0].input_norm, inputs.token_ids, inputs.slots, cache.last_tokens, inputs.first
        )
        self.sums: dict[tuple[int, int], Tensor] = {}  # of chunks, by a product's width and its rows

    def run(self, keep_all: bool) -> States:
        model, layers = self.model, self.model.layers
        norms = [*(layer.input_norm for layer in layers[1:]), model.norm]  # after each layer
        for i, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            q = self.queries(layer.qkv, i)
            x, self.residual = model.attend(q, self.residual, self.inputs, self.cache, i, keep_all)
            self.add_and_weigh(layer.o, x.flatten(1), layer.post_norm, _ROWS_OF_O_JOINED)
            x = layer.gate_up(self.rows.x, square_sums=self.rows.square_sums, eps=self.eps)
            if norm is model.norm and not model.lm_head.uses_wgmma:  # a vocabulary that is no multiple of 8
                return ops.rms_norm(self.residual, norm, self.eps, partials=layer.down.add_to(self.residual, x))
            self.add_and_weigh(layer.down, x, norm, _ROWS_OF_DOWN_JOINED)
        return self.rows

    def queries(self, qkv: ops.Linear, i: int) -> Tensor:
        """Return the rotated queries; keys and values are in layer i's cache then."""
        model, inputs, cache, (x, square_sums) = self.model, self.inputs, self.cache, self.rows
        where = (model.cos_sin, inputs.positions, inputs.slots, cache.block_table, cache.kv[i])
        heads = model.config.num_q_heads
        if x.shape[0] <= _ROWS_OF_QKV_JOINED:
            return qkv.rope_kv(self.rows, self.eps, *where, settled=True)
        if qkv.leaves_sums(x):
            sums = qkv.begin(x, self.sums_of(qkv, x))
            return ops.rope_kv(sums, *where, heads, eps=self.eps, square_sums=square_sums, settled=True)
        return ops.rope_kv(qkv(x, square_sums=square_sums, eps=self.eps), *where, heads, settled=True)

    def add_and_weigh(self, product: ops.Linear, x: Tensor, norm: Tensor, joined: int) -> None:
        """Add a product to the residual, and weigh that for the product after the norm."""
        residual = self.residual
        out = self.rows if self.rows.x.shape == residual.shape else None  # the last layer may have fewer
        many = product.num_chunks > 1 and not product.leaves_sums(x)
        if many or x.shape[0] <= joined:
            self.rows = product.add_and_weigh(residual, x, norm, out)
        else:
            partials = product.add_to(residual, x, self.sums_of(product, x))
            self.rows = ops.weigh_rows(residual, norm, partials, out)

    def sums_of(self, product: ops.Linear, x: Tensor) -> Tensor | None:
        """Return where a product leaves the sums of its chunks, if it does."""
        if not product.leaves_sums(x):
            return None
        key = (product.out_size, x.shape[0])
        if key not in self.sums:
            self.sums[key] = product.empty_sums(x)
        return self.sums[key]
