"""The operations of a step: each allocates its result and calls the kernel of its tensors' device.

Tensors are float32, bfloat16 or float16, one dtype and one device a call; index tensors are int32. A
shape, dtype, device or layout that does not fit raises ValueError and names the argument. A CUDA tensor
raises RuntimeError where the extension was compiled for the CPU alone.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.linear import Linear as Linear

if TYPE_CHECKING:
    from minivllm import _C
else:
    from minivllm import _extension

    _C = _extension.load()

# Words of a slot's row of state, and the bits of its flags (SlotWord and SlotFlag of csrc/kernels.h).
LAST_TOKEN = _C.LAST_TOKEN
TEMPERATURE = _C.TEMPERATURE
TOP_K = _C.TOP_K
TOP_P = _C.TOP_P
MIN_P = _C.MIN_P
REPETITION_PENALTY = _C.REPETITION_PENALTY
PRESENCE_PENALTY = _C.PRESENCE_PENALTY
FREQUENCY_PENALTY = _C.FREQUENCY_PENALTY
SEED_LOW = _C.SEED_LOW
SEED_HIGH = _C.SEED_HIGH
SAMPLE = _C.SAMPLE
FLAGS = _C.FLAGS
NUM_BIAS = _C.NUM_BIAS
SLOT_WORDS = _C.SLOT_WORDS
USES_COUNTS = _C.USES_COUNTS

_ONE_BITS: int = struct.unpack("<i", struct.pack("<f", 1.0))[0]


def embedding(
    weight: Tensor, token_ids: Tensor, slots: Tensor | None = None, last_tokens: Tensor | None = None
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

    Returns
    -------
    Tensor
        ``[num_tokens, hidden_size]``
    """
    out = torch.empty((token_ids.shape[0], weight.shape[1]), dtype=weight.dtype, device=weight.device)
    _C.embedding(out, weight, token_ids, slots, last_tokens)
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
        the residual and written to.

    Returns
    -------
    Tensor
        ``[num_rows, hidden_size]``
    """
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
) -> Tensor:
    """Rotate queries and keys by their positions and write keys and values into their blocks.

    https://arxiv.org/abs/2104.09864; pairs are ``(i, i + head_dim / 2)``.

    Parameters
    ----------
    qkv
        ``[num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]``; rows may be apart.
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
        That norm's.

    Returns
    -------
    Tensor
        The rotated queries, ``[num_tokens, num_q_heads, head_dim]``.
    """
    shape = (qkv.shape[-2], num_q_heads, kv_cache.shape[4])
    q = torch.empty(shape, dtype=kv_cache.dtype, device=qkv.device)
    _C.rope_kv(q, qkv, cos_sin, positions, slots, block_table, kv_cache, q_norm, k_norm, eps)
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

    Returns
    -------
    Tensor
        ``[num_tokens, num_q_heads, head_dim]``
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
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
) -> Tensor:
    """Attend from one new token a sequence: ``prefill_attention`` with one row of q a sequence.

    Parameters
    ----------
    q
        ``[num_seqs, num_q_heads, head_dim]``.
    kv_cache, block_table, slots, seq_lens, max_seq_len, scale
        As for ``prefill_attention``.
    workspace
        What ``attention_workspace`` gave: written to, and left as it was found.

    Returns
    -------
    Tensor
        ``[num_seqs, num_q_heads, head_dim]``
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _C.decode_attention(out, q, kv_cache, block_table, slots, seq_lens, max_seq_len, scale, workspace)
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


def update_state(state: Tensor, pairs: Tensor) -> None:
    """Write single words of the slots' state.

    Parameters
    ----------
    state
        int32, contiguous, of any shape: written to.
    pairs
        ``int32[num_pairs, 2]``: a flat index and its value. An index outside ``state`` is skipped.
    """
    _C.update_state(state, pairs)


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: Tensor,
    counts: Tensor | None = None,
    bias: tuple[Tensor, Tensor, Tensor] | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Draw the next token of each row by the parameters in its slot's state.

    Parameters
    ----------
    logits
        ``float32[num_rows, vocab_size]``; rows may be apart.
    slots
        ``int32[num_rows]``; nothing happens for a row of -1.
    positions
        ``int32[num_rows]``: the position that the new token takes, which keys the random numbers.
    state
        ``int32[num_slots, words]``, ``words >= SLOT_WORDS``: ``LAST_TOKEN`` is written.
    counts
        ``int32[num_slots, vocab_size]``: bit 30 for a token of the prompt, low bits for how often it was
        generated; written for slots with ``USES_COUNTS``. May be None where no slot has it.
    bias
        ``(ids int32, values float32, until int32)``, each ``[num_slots, max_bias]``: added to a logit
        while the position is below ``until``.
    workspace
        What ``sample_workspace`` gave: written to, and left as it was found.

    Returns
    -------
    Tensor
        ``int32[num_rows]``; -1 where a logit is NaN or none is finite.
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    ids, values, until = bias if bias is not None else (None, None, None)
    _C.sample(tokens, logits, slots, positions, state, counts, ids, values, until, workspace)
    return tokens


def sample_workspace(max_rows: int, vocab_size: int, device: torch.device) -> Tensor | None:
    """Return the workspace that ``sample`` needs for up to ``max_rows`` rows; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.zeros(_C.sample_workspace_size(max_rows, vocab_size), dtype=torch.uint8, device=device)


def logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log probabilities of the raw logits.

    Parameters
    ----------
    logits
        ``float32[num_rows, vocab_size]``; rows may be apart.
    tokens
        ``int32[num_rows]``; a negative one gives NaN and rank 0.
    top_n
        How many of the likeliest tokens to list, 0 or more.

    Returns
    -------
    tuple
        ``float32[num_rows]`` and ``int32[num_rows]``: each token's log probability and rank, 1 for the
        likeliest; ``int32[num_rows, top_n]`` and ``float32[num_rows, top_n]``: the likeliest tokens in
        falling order, the lowest id first among equals, and theirs.
    """
    rows, device = logits.shape[0], logits.device
    found = torch.empty(rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    top_ids = torch.empty((rows, top_n), dtype=torch.int32, device=device)
    top_logprobs = torch.empty((rows, top_n), dtype=torch.float32, device=device)
    _C.logprobs(found, ranks, top_ids, top_logprobs, logits, tokens)
    return found, ranks, top_ids, top_logprobs


def count_tokens(counts_row: Tensor, token_ids: Tensor, num_prompt_tokens: int) -> None:
    """Start a slot's row of counts again from a sequence's tokens, the prompt's first.

    ``counts_row`` is ``int32[vocab_size]`` and written to; ``token_ids`` is ``int32[num_tokens]``.
    """
    _C.count_tokens(counts_row, token_ids, num_prompt_tokens)


def argmax(logits: Tensor) -> Tensor:
    """Return the largest logit's id in each row, ``int32[num_rows]``, the lowest among equals.

    ``logits`` is ``float32[num_rows, vocab_size]``, rows may be apart. A row where a logit is NaN or none
    is finite gives -1.
    """
    rows, device = logits.shape[0], logits.device
    state = torch.zeros((rows, SLOT_WORDS), dtype=torch.int32, device=device)
    state[:, TOP_P] = _ONE_BITS
    state[:, REPETITION_PENALTY] = _ONE_BITS
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    workspace = sample_workspace(rows, logits.shape[1], device)
    return sample(logits, slots, slots, state, workspace=workspace)
