"""The decoder: a Llama-family model over the blocks of a KV cache, one forward for every mix of prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm import fused, ops
from minivllm.config import rope_cos_sin

if TYPE_CHECKING:
    from minivllm.config import ModelConfig
    from minivllm.split_norm import States


@dataclass
class Inputs:
    """Hold one step's arrays on the device: `minivllm.batch.Batch` after the copy. int32 all."""

    num_decode: int
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T], -1: padding
    sample_lens: Tensor  # [R]
    sample_slots: Tensor  # [R]
    sample_rows: Tensor | None  # [R]; None: every row draws
    seq_slots: Tensor | None = None  # [P]
    seq_lens: Tensor | None = None  # [P]
    q_starts: Tensor | None = None  # [P + 1]
    max_q_len: int = 0
    max_seq_len: int = 0  # a bound for every sequence of the step
    first: bool = False  # nothing before the step is still running when it starts, as in a graph of its own


@dataclass
class Cache:
    """Hold what the device keeps between steps: keys and values, and where each slot's are."""

    kv: Tensor  # [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_table: Tensor  # int32 [num_slots, max_blocks], a view of the slots' state
    last_tokens: Tensor  # int32 [num_slots], a view of the slots' state
    workspace: Tensor | None  # of the decode attention


@dataclass
class Layer:
    """Hold one decoder layer's weights."""

    input_norm: Tensor
    qkv: ops.Linear
    o: ops.Linear
    post_norm: Tensor
    gate_up: ops.Linear
    down: ops.Linear
    q_norm: Tensor | None
    k_norm: Tensor | None


class Model:
    """Compute hidden states and logits of a Llama-family decoder.

    Parameters
    ----------
    config : ModelConfig
    weights : dict of str to Tensor
        By the loader's names. Emptied: the model keeps each weight in the layout that its device's kernels read.
    max_seq_len : int
        Positions that the rotary table covers.
    exact : bool
        Whether bits may not follow from the number of rows: see `minivllm.ops.Linear`.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], max_seq_len: int, *, exact: bool = True
    ) -> None:
        self.config = config
        self.embed = weights.pop("embed")
        self.device, self.dtype = self.embed.device, self.embed.dtype
        self.scale = config.head_dim**-0.5
        self.layers = [self._layer(weights, f"layers.{i}.", exact) for i in range(config.num_layers)]
        self.norm = weights.pop("norm")
        self.lm_head = ops.Linear(weights.pop("lm_head") if "lm_head" in weights else self.embed, exact=exact)
        self.cos_sin = rope_cos_sin(config, max_seq_len).to(self.device)
        self.fused = fused.suits(self)  # whether norms and rope are parts of the products

    @staticmethod
    def _layer(weights: dict[str, Tensor], name: str, exact: bool) -> Layer:
        def take(key: str) -> Tensor:
            return weights.pop(name + key)

        def maybe(key: str) -> Tensor | None:
            return weights.pop(name + key, None)

        return Layer(
            input_norm=take("input_norm"),
            qkv=ops.Linear(take("qkv"), maybe("qkv_bias"), exact=exact),
            o=ops.Linear(take("o"), maybe("o_bias"), exact=exact),
            post_norm=take("post_norm"),
            gate_up=ops.Linear(take("gate_up"), gate_up=True, exact=exact),
            down=ops.Linear(take("down"), exact=exact),
            q_norm=maybe("q_norm"),
            k_norm=maybe("k_norm"),
        )

    def forward(self, inputs: Inputs, cache: Cache, keep_all: bool = False) -> States:
        """Write the step's keys and values to the cache and return the hidden states that logits come from.

        Parameters
        ----------
        inputs : Inputs
        cache : Cache
            ``kv`` is written.
        keep_all : bool
            Return all T rows, as the prompt's log probabilities need them; else the R rows that draw, so that the
            last layer computes only those past its keys and values.

        Returns
        -------
        Tensor or ops.Weighed
            ``[R or T, hidden_size]``, normed, or half so where the model is fused: for `logits`.
        """
        if self.fused and inputs.token_ids.shape[0] <= self.layers[0].qkv.most_rows:
            return fused.hidden_states(self, inputs, cache, keep_all)
        config = self.config
        residual = ops.embedding(self.embed, inputs.token_ids, inputs.slots, cache.last_tokens, inputs.first)
        pending = None  # of the product before, still to be added to the residual
        for i, layer in enumerate(self.layers):
            x = ops.rms_norm(residual, layer.input_norm, config.rms_norm_eps, partials=pending)
            q = ops.rope_kv(
                layer.qkv.begin(x),
                self.cos_sin,
                inputs.positions,
                inputs.slots,
                cache.block_table,
                cache.kv[i],
                config.num_q_heads,
                layer.q_norm,
                layer.k_norm,
                config.rms_norm_eps,
                settled=True,
            )
            x, residual = self.attend(q, residual, inputs, cache, i, keep_all)
            pending = layer.o.add_to(residual, x.flatten(1))
            x = ops.rms_norm(residual, layer.post_norm, config.rms_norm_eps, partials=pending)
            pending = layer.down.add_to(residual, layer.gate_up(x))
        return ops.rms_norm(residual, self.norm, config.rms_norm_eps, partials=pending)

    def attend(
        self, q: Tensor, residual: Tensor, inputs: Inputs, cache: Cache, i: int, keep_all: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what layer i's attention gives, and the residual of the same rows: in the last those that draw."""
        if i + 1 < len(self.layers) or inputs.sample_rows is None or keep_all:
            return self._attention(q, inputs, cache, i), residual
        q, residual = q.index_select(0, inputs.sample_rows), residual.index_select(0, inputs.sample_rows)
        # These rows' keys may all be new.
        return self._decode(q, inputs.sample_slots, inputs.sample_lens, inputs, cache, i, settled=False), residual

    def _attention(self, q: Tensor, inputs: Inputs, cache: Cache, i: int) -> Tensor:
        d = inputs.num_decode
        if inputs.seq_slots is None:
            return self._decode(q, inputs.slots, inputs.sample_lens, inputs, cache, i)
        assert inputs.seq_lens is not None and inputs.q_starts is not None
        out = torch.empty_like(q)
        ops.prefill_attention(
            q[d:],
            cache.kv[i],
            cache.block_table,
            inputs.seq_slots,
            inputs.seq_lens,
            inputs.q_starts,
            inputs.max_q_len,
            inputs.max_seq_len,
            self.scale,
            out[d:],
        )
        if d > 0:
            self._decode(q[:d], inputs.slots[:d], inputs.sample_lens[:d], inputs, cache, i, out[:d])
        return out

    def _decode(
        self,
        q: Tensor,
        slots: Tensor,
        lens: Tensor,
        inputs: Inputs,
        cache: Cache,
        i: int,
        out: Tensor | None = None,
        settled: bool = True,
    ) -> Tensor:
        kv, table, longest = cache.kv[i], cache.block_table, inputs.max_seq_len
        return ops.decode_attention(
            q, kv, table, slots, lens, longest, self.scale, cache.workspace, out, settled=settled
        )

    def logits(self, hidden: States, out: Tensor | None = None, leaders: ops.Leaders | None = None) -> Tensor:
        """Return float32 ``[rows, vocab_size]``, in ``out`` if given, of what `forward` gave, or of rows of it.

        With ``leaders``, which need a head that finds them, there are those, and logits as far as they are wanted.
        """
        x, square_sums = hidden if isinstance(hidden, ops.Weighed) else (hidden, None)
        eps = self.config.rms_norm_eps
        if leaders is not None:
            return self.lm_head.logits(x, leaders, out, square_sums=square_sums, eps=eps)
        return self.lm_head(x, out_dtype=torch.float32, out=out, square_sums=square_sums, eps=eps)
