"""A matrix product whose weight was laid out once for its device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.sampling_ops import Leaders
from minivllm.split_norm import Weighed, empty_weighed

if TYPE_CHECKING:
    from minivllm import _C
else:
    from minivllm import _extension

    _C = _extension.load()


# Beyond so many rows the sums of K's chunks are more to move than is gained by adding them later.
_MOST_ROWS_IN_PARTS = 256
# Of a product that need not be exact, on Hopper: with more cuBLAS is the faster, by some percent.
_MOST_ROWS_OF_OURS = 1024


def interleave_halves(halves: Tensor) -> Tensor:
    """Return the rows of ``[a; b]`` as a, b, a, b, ..."""
    return torch.stack(halves.chunk(2), dim=1).reshape(halves.shape).contiguous()


class Linear:
    """Multiply by a weight: ``x @ weight.T + bias``, in an order of additions that the weight's shape alone fixes.

    On the CPU the weight is packed for the vector units and the original is not kept. On CUDA it stays
    as it is, but for the rows of a gated pair, which are interleaved where our kernels multiply.

    Parameters
    ----------
    weight
        ``[out_size, in_size]``, float32, bfloat16 or float16, on the device where products will run.
    bias
        ``[out_size]`` in the weight's dtype, or None.
    gate_up
        The weight is ``[gate; up]`` and the product is ``silu(gate) * up``, half as wide.
    exact
        False lets cuBLAS multiply on CUDA where it is the faster: plain products and sums with a residual of more
        than 1,024 rows in bfloat16 or float16 on Hopper, all products on other cards and in float32. Its bits may
        follow from the number of rows. Results that are wider than the weight, `add_and_weigh`, `rope_kv` and the
        CPU are exact all the same.

    Raises
    ------
    ValueError
        The weight is no matrix, or ``gate_up`` and ``out_size`` is odd.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, gate_up: bool = False, exact: bool = True
    ) -> None:
        if weight.dim() != 2 or (gate_up and weight.shape[0] % 2):
            raise ValueError(f"weight must be a matrix, of an even height for gate_up, not {list(weight.shape)}")
        self.out_size, self.in_size = weight.shape
        self.gate_up = gate_up
        weight = weight.detach().contiguous()
        bias = None if bias is None else bias.detach().contiguous()
        epilogue = _C.EPILOGUE_SILU_MUL if gate_up else _C.EPILOGUE_NONE
        self.num_chunks = _C.linear_chunks(weight, epilogue) if bias is None else 1
        self.uses_wgmma = _C.linear_uses_wgmma(weight, epilogue)  # the kernel for Hopper
        self.most_rows = sys.maxsize  # that our kernels multiply
        if weight.is_cuda and not exact:
            if not self.uses_wgmma:
                self.most_rows = 0
            elif not gate_up:  # beside it torch would need another pass for silu(gate) * up
                self.most_rows = _MOST_ROWS_OF_OURS
        if gate_up and self.most_rows > 0:
            weight = interleave_halves(weight)
            bias = None if bias is None else interleave_halves(bias)
        if not weight.is_cuda:
            packed = weight.new_empty(_C.packed_weight_size(weight))
            _C.pack_weight(packed, weight)
            weight = packed
        self.weight = weight
        self.bias = bias

    def __call__(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        square_sums: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Multiply rows.

        Parameters
        ----------
        x
            ``[num_tokens, in_size]`` in the weight's dtype; rows may be apart.
        residual
            ``[num_tokens, out_size]``: written to, the product is added to it.
        out_dtype
            ``x``'s, where None; or float32, with neither ``residual`` nor ``gate_up``.
        out
            ``[num_tokens, out_size]``, float32 or ``x``'s dtype: written to and returned; for plain products.
        square_sums, eps
            Of `Weighed` rows, whose ``x`` is x: what comes out is that of the normed rows. Where ``uses_wgmma``.

        Returns
        -------
        Tensor
            ``residual`` where given, else ``[num_tokens, out_size]`` (half of it for ``gate_up``).

        Raises
        ------
        ValueError
            A shape, dtype or device does not fit, or what is asked for together does not.
        """
        if self.gate_up and residual is not None:
            raise ValueError("gate_up has no residual")
        if out is not None and (self.gate_up or residual is not None):
            raise ValueError("out is for plain products, with neither gate_up nor a residual")
        if out is not None and out_dtype not in (None, out.dtype):
            raise ValueError(f"out is {out.dtype}, and out_dtype {out_dtype}")
        wider = (out_dtype if out is None else out.dtype) not in (None, x.dtype)
        if wider and (self.gate_up or residual is not None):
            raise ValueError("out_dtype is for plain products, with neither gate_up nor a residual")
        if x.shape[0] > self.most_rows and not wider and square_sums is None:
            return self._with_torch(x, residual, out)
        epilogue = _C.EPILOGUE_NONE
        if residual is not None:
            out, epilogue = residual, _C.EPILOGUE_RESIDUAL
        elif self.gate_up:
            epilogue = _C.EPILOGUE_SILU_MUL
            out = torch.empty((x.shape[0], self.out_size // 2), dtype=x.dtype, device=x.device)
        elif out is None:
            out = torch.empty((x.shape[0], self.out_size), dtype=out_dtype or x.dtype, device=x.device)
        _C.linear(out, x, self.weight, self.out_size, self.bias, epilogue, self.num_chunks, square_sums, eps)
        return out

    @property
    def finds_leaders(self) -> bool:
        """Say whether `logits` works: for one chain over K, by the kernel for Hopper."""
        return self.uses_wgmma and self.num_chunks == 1 and not self.gate_up

    def logits(
        self,
        x: Tensor,
        leaders: Leaders,
        out: Tensor | None = None,
        *,
        square_sums: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Multiply rows to float32, and note the largest of every 64 columns of a row.

        Parameters
        ----------
        x
            ``[num_tokens, in_size]``; rows may be apart.
        leaders
            Where they go, and whose they are. Where no row of 64 has a slot without ``LEADER_SUFFICES``, no logits
            are written.
        out
            ``float32[num_tokens, out_size]``, or None.
        square_sums, eps
            Of `Weighed` rows, whose ``x`` is x.

        Returns
        -------
        Tensor
            ``out`` where given, else a tensor like it. Rows with ``LEADER_SUFFICES`` or no slot may hold anything.

        Raises
        ------
        ValueError
            A shape, dtype or device does not fit, or the kernel for Hopper does not take the product.
        """
        if self.gate_up:
            raise ValueError("gate_up has no leaders")
        if out is None:
            out = torch.empty((x.shape[0], self.out_size), dtype=torch.float32, device=x.device)
        noted, slots, state = leaders
        _C.linear_leaders(out, noted, x, self.weight, self.bias, self.num_chunks, slots, state, square_sums, eps)
        return out

    def begin(self, x: Tensor, sums: Tensor | None = None) -> Tensor:
        """Multiply rows, and leave the last additions to the kernel after it where that is faster.

        Parameters
        ----------
        x
            ``[num_tokens, in_size]``; rows may be apart.
        sums
            What `empty_sums` gave for as many rows: written to and returned, if sums are.

        Returns
        -------
        Tensor
            ``[num_tokens, out_size]``, or the sums of K's chunks ``float32[num_chunks, num_tokens, out_size]``,
            which come to the same bits when they are added in order and rounded.
        """
        if not self.leaves_sums(x):
            return self(x)
        sums = self.empty_sums(x) if sums is None else sums
        _C.linear(sums, x, self.weight, self.out_size, None, _C.EPILOGUE_NONE, self.num_chunks)
        return sums

    def empty_sums(self, x: Tensor) -> Tensor:
        """Allocate what `begin` may leave of these rows, ``float32[num_chunks, num_tokens, out_size]``."""
        return torch.empty((self.num_chunks, x.shape[0], self.out_size), dtype=torch.float32, device=x.device)

    def add_to(self, residual: Tensor, x: Tensor, sums: Tensor | None = None) -> Tensor | None:
        """Add the product to ``residual``, in place, or return the sums that are still to be added to it.

        ``rms_norm`` takes what is returned as its ``partials``; ``sums`` is as for `begin`.
        """
        if self.leaves_sums(x):
            return self.begin(x, sums)
        self(x, residual=residual)
        return None

    def add_and_weigh(self, residual: Tensor, x: Tensor, norm_weight: Tensor, out: Weighed | None = None) -> Weighed:
        """Add the product to ``residual``, in place, and do the first half of the RMSNorm of its new rows.

        Parameters
        ----------
        residual
            ``[num_tokens, out_size]``: written to; ``out_size`` is a multiple of 64, and ``num_tokens`` at most 64
            where K is one chain.
        x
            ``[num_tokens, in_size]``; rows may be apart.
        norm_weight
            ``[out_size]``, of the norm that follows.
        out
            Written to and returned, where given.

        Returns
        -------
        Weighed
            For the product that follows.

        Raises
        ------
        ValueError
            A shape, dtype or device does not fit, or the kernel for Hopper does not take the product.
        """
        weighed = empty_weighed(residual) if out is None else out
        _C.linear_residual_norm(residual, *weighed, x, self.weight, norm_weight, self.bias, self.num_chunks)
        return weighed

    def rope_kv(
        self,
        rows: Weighed,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        kv_cache: Tensor,
        settled: bool = False,
    ) -> Tensor:
        """Multiply rows by ``[q; k; v]``, rotate queries and keys and write keys and values into their blocks.

        Parameters
        ----------
        rows
            ``[num_tokens, in_size]``, at most 64 whose norm is half done.
        eps
            That norm's.
        cos_sin, positions, slots, block_table, kv_cache, settled
            As for `minivllm.ops.rope_kv`; ``head_dim`` is 64.

        Returns
        -------
        Tensor
            The rotated queries, ``[num_tokens, num_q_heads, head_dim]``.

        Raises
        ------
        ValueError
            A shape, dtype or device does not fit, or the kernel for Hopper does not take the product.
        """
        x, square_sums = rows
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        num_q_heads = self.out_size // head_dim - 2 * num_kv_heads
        q = torch.empty((x.shape[0], max(num_q_heads, 0), head_dim), dtype=x.dtype, device=x.device)
        _C.linear_rope_kv(
            q,
            x,
            square_sums,
            eps,
            self.weight,
            self.bias,
            self.num_chunks,
            cos_sin,
            positions,
            slots,
            block_table,
            kv_cache,
            settled,
        )
        return q

    def leaves_sums(self, x: Tensor) -> bool:
        """Say whether `begin` and `add_to` leave the last additions for these rows to the kernel after them."""
        return self.num_chunks > 1 and x.shape[0] <= _MOST_ROWS_IN_PARTS

    def _with_torch(self, x: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
        if residual is not None and self.bias is None:
            return residual.addmm_(x, self.weight.t())
        y = F.linear(x, self.weight, self.bias)
        if residual is not None:
            return residual.add_(y)
        if self.gate_up:
            out = torch.empty((y.shape[0], self.out_size // 2), dtype=y.dtype, device=y.device)
            _C.silu_mul(out, y)
            return out
        return y if out is None else out.copy_(y)
