"""The operations of a step: each allocates its result and calls the kernel of its tensors' device.

Tensors are float32, bfloat16 or float16, one dtype and one device a call; index tensors are int32. A
shape, dtype, device or layout that does not fit raises ValueError and names the argument. A CUDA tensor
raises RuntimeError where the extension was compiled for the CPU alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.linear import Linear as Linear
from minivllm.sampling_ops import FLAGS as FLAGS
from minivllm.sampling_ops import FREQUENCY_PENALTY as FREQUENCY_PENALTY
from minivllm.sampling_ops import LAST_TOKEN as LAST_TOKEN
from minivllm.sampling_ops import LEADER_SUFFICES as LEADER_SUFFICES
from minivllm.sampling_ops import MIN_P as MIN_P
from minivllm.sampling_ops import NUM_BIAS as NUM_BIAS
from minivllm.sampling_ops import PRESENCE_PENALTY as PRESENCE_PENALTY
from minivllm.sampling_ops import REPETITION_PENALTY as REPETITION_PENALTY
from minivllm.sampling_ops import SAMPLE as SAMPLE
from minivllm.sampling_ops import SEED_HIGH as SEED_HIGH
from minivllm.sampling_ops import SEED_LOW as SEED_LOW
from minivllm.sampling_ops import SLOT_WORDS as SLOT_WORDS
from minivllm.sampling_ops import TEMPERATURE as TEMPERATURE
from minivllm.sampling_ops import TOP_K as TOP_K
from minivllm.sampling_ops import TOP_P as TOP_P
from minivllm.sampling_ops import USES_COUNTS as USES_COUNTS
from minivllm.sampling_ops import Leaders as Leaders
from minivllm.sampling_ops import StepCounters as StepCounters
from minivllm.sampling_ops import argmax as argmax
from minivllm.sampling_ops import copy_words as copy_words
from minivllm.sampling_ops import count_tokens as count_tokens
from minivllm.sampling_ops import empty_leaders as empty_leaders
from minivllm.sampling_ops import logprobs as logprobs
from minivllm.sampling_ops import sample as sample
from minivllm.sampling_ops import sample_workspace as sample_workspace
from minivllm.sampling_ops import update_state as update_state
from minivllm.split_norm import Weighed as Weighed
from minivllm.split_norm import embed_and_weigh as embed_and_weigh
from minivllm.split_norm import weigh_rows as weigh_rows

if TYPE_CHECKING:
    from minivllm import _C
else:
    from minivllm import _extension

    _C = _extension.load()


def embedding(
    weight: Tensor,
    token_ids: Tensor,
    slots: Tensor | None = None,
    last_tokens: Tensor | None = None,
    first: bool = False,
) -> Tensor:
    """Look tokens up.

    Parameters
    ----------
    weight
        ``[vocab_size, hidden_size]``.
    token_ids
        ``int32[num_tokens]``; -1 stands for the last token of the row's slot. Other ids outside the
        vocabulary read row 0.
    slots
        ``int32[num_tokens]``, -1 for padding; needed with ``last_tokens``.
    last_tokens
        ``int32[num_slots]``, at any stride.
    first
        Nothing before it in the stream is still running when it starts, as at the head of a captured graph. Without
        it the kernels after it start once that is so.

    Returns
    -------
    Tensor
        ``[num_tokens, hidden_size]``
    """
    out = torch.empty((token_ids.shape[0], weight.shape[1]), dtype=weight.dtype, device=weight.device)
    _C.embedding(out, weight, token_ids, slots, last_tokens, first)
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, partials: Tensor | None = None
) -> Tensor:
    """Normalise rows by their root mean square (https://arxiv.org/abs/1910.07467).

    Parameters
    ----------
    x
        ``[num_rows, hidden_size]``; rows may be apart.
    weight
        ``[hidden_size]``.
    eps
        Added to the mean square.
    residual
        ``[num_rows, hidden_size]``: written to, ``x`` is added to it, and its rows are normalised.
    partials
        ``float32[num_partials, num_rows, hidden_size]``, what `Linear.add_to` left: added to ``x``, which is then
        the residual and written to. Not beside ``residual``.

    Returns
    -------
    Tensor
        ``[num_rows, hidden_size]``
    """
    if residual is not None and partials is not None:
        raise ValueError("partials are added to x, so that there is no other residual")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _C.rms_norm(out, x, weight, eps, residual if partials is None else x, partials)
    return out


def rope_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    kv_cache: Tensor,
    num_q_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    square_sums: Tensor | None = None,
    settled: bool = False,
) -> Tensor:
    """Rotate queries and keys by their positions and write keys and values into their blocks.

    https://arxiv.org/abs/2104.09864; pairs are ``(i, i + head_dim / 2)``.

    Parameters
    ----------
    qkv
        ``[num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]``; rows may be apart. Or what `Linear.begin` left.
    cos_sin
        ``float32[max_position, head_dim]``: ``head_dim / 2`` cosines, then as many sines.
    positions
        ``int32[num_tokens]``.
    slots
        ``int32[num_tokens]``; for a row of -1 nothing is written to the cache.
    block_table
        ``int32[num_slots, max_blocks]``; rows may be apart.
    kv_cache
        ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, one layer: written to.
    num_q_heads
        Query heads of a token.
    q_norm, k_norm
        ``[head_dim]``: weights of an RMSNorm of each head before the rotation, or None.
    eps
        That norm's, or that of ``square_sums``.
    square_sums
        Of `Weighed` rows whose product ``qkv`` is, as partial sums; heads are of 64 then. What comes out is that of
        the normed rows.
    settled
        As for ``decode_attention``, of ``positions``, ``slots`` and ``block_table``.

    Returns
    -------
    Tensor
        The rotated queries, ``[num_tokens, num_q_heads, head_dim]``.
    """
    shape = (qkv.shape[-2], num_q_heads, kv_cache.shape[4])
    q = torch.empty(shape, dtype=kv_cache.dtype, device=qkv.device)
    _C.rope_kv(q, qkv, cos_sin, positions, slots, block_table, kv_cache, q_norm, k_norm, eps, square_sums, settled)
    return q


def prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    q_starts: Tensor,
    max_q_len: int,
    max_seq_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from runs of new tokens to the keys up to each one's position.

    https://arxiv.org/abs/2205.14135 (online softmax), https://arxiv.org/abs/2309.06180 (blocks). The
    last new token of a sequence stands at its last position; a row comes out bitwise as
    ``decode_attention`` gives it.

    Parameters
    ----------
    q
        ``[num_tokens, num_q_heads, head_dim]``.
    kv_cache
        ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, with the new tokens' keys and values.
    block_table
        ``int32[num_slots, max_blocks]``; rows may be apart.
    slots
        ``int32[num_seqs]``; the rows of a sequence of -1 come out undefined.
    seq_lens
        ``int32[num_seqs]``, tokens with KV, the new ones included.
    q_starts
        ``int32[num_seqs + 1]``: sequence s owns the rows ``q_starts[s] .. q_starts[s + 1]`` of q.
    max_q_len, max_seq_len
        Bounds for the new tokens of a sequence and for ``seq_lens``.
    scale
        Of the scores, ``head_dim ** -0.5`` as a rule.
    out
        Where the result goes, if given.

    Returns
    -------
    Tensor
        ``[num_tokens, num_q_heads, head_dim]``
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _C.prefill_attention(out, q, kv_cache, block_table, slots, seq_lens, q_starts, max_q_len, max_seq_len, scale)
    return out


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    settled: bool = False,
) -> Tensor:
    """Attend from one new token a sequence: ``prefill_attention`` with one row of q a sequence.

    Parameters
    ----------
    q
        ``[num_seqs, num_q_heads, head_dim]``.
    kv_cache, block_table, slots, seq_lens, max_seq_len, scale, out
        As for ``prefill_attention``.
    workspace
        What ``attention_workspace`` gave: written to, and left as it was found.
    settled
        ``embedding`` or ``embed_and_weigh``, or the beginning of a captured graph, came after the last that wrote to
        ``slots``, ``seq_lens``, ``block_table`` or any key or value but those of each sequence's last token, so that
        on a GPU all this may be read early.

    Returns
    -------
    Tensor
        ``[num_seqs, num_q_heads, head_dim]``
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _C.decode_attention(out, q, kv_cache, block_table, slots, seq_lens, max_seq_len, scale, workspace, settled)
    return out


def attention_workspace(
    max_seqs: int, max_seq_len: int, num_q_heads: int, head_dim: int, device: torch.device
) -> Tensor | None:
    """Return the workspace of ``decode_attention`` for batches up to these bounds; None on the CPU."""
    if device.type != "cuda":
        return None
    size = _C.attention_workspace_size(max_seqs, max_seq_len, num_q_heads, head_dim)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def silu_mul(x: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, ``[num_tokens, size]``; x is ``[gate | up]``, ``[num_tokens, 2 * size]``."""
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
    _C.silu_mul(out, x)
    return out
