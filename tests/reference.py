"""Each operation in plain torch, in the dtype of its arguments: with float64 ones it is the truth, with
half-precision ones it shows how large an error is to be expected.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(
    weight: Tensor, token_ids: Tensor, slots: Tensor | None = None, last_tokens: Tensor | None = None
) -> Tensor:
    """``weight[token_ids]``; -1 is the last token of the row's slot, an id outside the vocabulary is 0."""
    ids = token_ids.long()
    if slots is not None and last_tokens is not None:
        ids = torch.where((ids < 0) & (slots >= 0), last_tokens.long()[slots.long().clamp(min=0)], ids)
    ids = torch.where((ids < 0) | (ids >= weight.shape[0]), 0, ids)
    return weight[ids]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate ``[num_tokens, num_heads, head_dim]`` in the pairs ``(i, i + head_dim / 2)``."""
    cos, sin = cos_sin[positions.long()][:, None].to(x.dtype).chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def split_qkv(qkv: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """Split ``[num_tokens, heads * head_dim]`` into q, k and v, each ``[num_tokens, heads, head_dim]``."""
    heads = qkv.unflatten(-1, (-1, head_dim))
    return heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)


def write_kv(kv_cache: Tensor, block_table: Tensor, slot: int, first: int, k: Tensor, v: Tensor) -> None:
    """Write keys and values ``[n, num_kv_heads, head_dim]`` of the positions from ``first`` on."""
    positions = torch.arange(first, first + k.shape[0], device=k.device)
    blocks, offsets = block_table[slot, positions // kv_cache.shape[3]].long(), positions % kv_cache.shape[3]
    kv_cache[blocks, 0, :, offsets] = k
    kv_cache[blocks, 1, :, offsets] = v


def read_kv(kv_cache: Tensor, block_table: Tensor, slot: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values ``[seq_len, num_kv_heads, head_dim]`` of a slot."""
    block_size = kv_cache.shape[3]
    blocks = block_table[slot, : -(-seq_len // block_size)].long()
    k, v = kv_cache[blocks].unbind(1)
    return tuple(t.transpose(1, 2).flatten(0, 1)[:seq_len] for t in (k, v))  # type: ignore[return-value]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last ``q.shape[0]`` of ``k.shape[0]`` tokens, ``[n, num_heads, head_dim]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    last = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)
    hidden = torch.arange(k.shape[0], device=q.device)[None] > last[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def silu_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[gate | up]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate_up: bool = False,
) -> Tensor:
    """``x @ weight.T + bias``, then the residual is added or the gate applied."""
    y = F.linear(x, weight, bias)
    if gate_up:
        return silu_mul(y)
    return y if residual is None else residual + y


def adjust_logits(
    logits: Tensor,
    prompt_ids: list[int],
    output_ids: list[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
) -> Tensor:
    """Apply a bias and the penalties to ``float32[vocab_size]``, as vLLM defines them.

    Repetition divides positive and multiplies negative logits of every token seen; presence and frequency
    count generated tokens alone.
    """
    logits = logits.clone()
    for token, value in (bias or {}).items():
        logits[token] += value
    counts = torch.bincount(torch.tensor(output_ids, dtype=torch.long), minlength=len(logits)).to(logits)
    seen = counts > 0
    seen[torch.tensor(prompt_ids, dtype=torch.long)] = True
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)


def token_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return what ``float32[vocab_size]`` adjusted logits are drawn with, in vLLM's order.

    Temperature, then min-p against the likeliest, then the ``top_k`` likeliest with all that equal the
    last of them, then the smallest set of the likeliest whose sum reaches ``top_p``.
    """
    if temperature == 0:
        return F.one_hot(logits.argmax(), len(logits)).to(logits)
    logits = logits.double() / temperature
    p = logits.softmax(-1)
    logits = logits.masked_fill(p < min_p * p.max(), -torch.inf)
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    p, order = logits.softmax(-1).sort(descending=True, stable=True)
    before = p.cumsum(-1) - p
    dropped = before >= top_p
    dropped[0] = False
    logits[order[dropped]] = -torch.inf
    return logits.softmax(-1).float()


def logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probabilities and ranks of tokens, and the likeliest tokens, the lowest id first among equals."""
    all_logprobs = logits.double().log_softmax(-1)
    found = all_logprobs.gather(1, tokens.long()[:, None])
    ranks = (all_logprobs > found).sum(-1) + 1
    ids = logits.argsort(dim=-1, descending=True, stable=True)
    top = all_logprobs.gather(1, ids[:, :top_n])
    return found[:, 0].float(), ranks.int(), ids[:, :top_n].int(), top.float()
