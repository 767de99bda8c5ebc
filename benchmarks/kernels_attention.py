"""Attention kernels: times, bandwidth and rates, beside torch's scaled dot product attention."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DEVICE = "cuda"
ROTATE_BYTES = 400 << 20  # inputs of a timed sequence together: well past L2


def graph_time(calls: list[Callable[[], None]], repeats: int = 7) -> float:
    """Median seconds of one call, all calls captured in one graph and replayed."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[1:])


def filled_cache(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    """A bfloat16 cache of random numbers."""
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def decode_row(
    kernels: Any,
    lengths: list[int],
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 64,
    block_size: int = 64,
    max_seq_len: int = 131072,
) -> dict[str, float]:
    """Time and share of bandwidth of one decode call over shuffled blocks; layers rotate."""
    batch, (num_q_heads, num_kv_heads) = len(lengths), heads
    tokens = sum(lengths)
    data = tokens * num_kv_heads * head_dim * 2 * 2
    counts = [-(-n // block_size) for n in lengths]
    layers = max(2, min(64, math.ceil(ROTATE_BYTES / data)))
    caches = [filled_cache(sum(counts), num_kv_heads, block_size, head_dim) for _ in range(layers)]
    table = torch.full((batch, max(counts)), -1, dtype=torch.int32)
    ids = torch.randperm(sum(counts)).to(torch.int32)
    at = 0
    for i, count in enumerate(counts):
        table[i, :count] = ids[at : at + count]
        at += count
    table = table.to(DEVICE)
    slots = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, num_q_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    size = kernels.attention_workspace_size(batch, max_seq_len, num_q_heads, head_dim)
    workspace = torch.zeros(size, dtype=torch.uint8, device=DEVICE)

    def call(cache: torch.Tensor) -> Callable[[], None]:
        return lambda: kernels.decode_attention(
            out, q, cache, table, slots, seq_lens, max_seq_len, head_dim**-0.5, workspace
        )

    seconds = graph_time([call(cache) for cache in caches] * max(1, 32 // layers))
    return {"us": seconds * 1e6, "tb_s": data / seconds / 1e12, "share": data / seconds / 4.6e12}


def prefill_row(
    kernels: Any,
    lengths: list[int],
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 64,
    block_size: int = 64,
    baselines: bool = True,
) -> dict[str, float]:
    """Time and rate (causal operations) of prefill over shuffled blocks, and torch's on dense tensors."""
    num_q_heads, num_kv_heads = heads
    counts = [-(-n // block_size) for n in lengths]
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    ids = torch.randperm(sum(counts)).to(torch.int32)
    at = 0
    for i, count in enumerate(counts):
        table[i, :count] = ids[at : at + count]
        at += count
    table = table.to(DEVICE)
    ints = {"dtype": torch.int32, "device": DEVICE}
    slots = torch.arange(len(lengths), **ints)
    seq_lens = torch.tensor(lengths, **ints)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], **ints)
    operations = sum(2 * n * (n + 1) * head_dim * num_q_heads for n in lengths)
    caches = [filled_cache(sum(counts), num_kv_heads, block_size, head_dim) for _ in range(4)]
    queries = [torch.randn(sum(lengths), num_q_heads, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    out = torch.empty_like(queries[0])

    def call(cache: torch.Tensor, q: torch.Tensor) -> Callable[[], None]:
        return lambda: kernels.prefill_attention(
            out,
            q,
            cache,
            table,
            slots,
            seq_lens,
            starts,
            max(lengths),
            max(lengths),
            head_dim**-0.5,
        )

    seconds = graph_time([call(cache, q) for cache, q in zip(caches, queries, strict=True)])
    row = {"us": seconds * 1e6, "tflops": operations / seconds / 1e12}
    if baselines and len(set(lengths)) == 1:
        batch, n = len(lengths), lengths[0]
        q, k, v = (torch.randn(batch, num_q_heads, n, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        for name, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            with sdpa_kernel(backend):
                t = graph_time([lambda: scaled_dot_product_attention(q, k, v, is_causal=True)] * 4)
            row[name] = operations / t / 1e12
    return row


def ragged(batch: int, low: int, high: int) -> list[int]:
    """Lengths drawn once, the same for every run."""
    return torch.randint(low, high + 1, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()


DECODE = {
    "b1 c128": [128],
    "b1 c640": [640],
    "b1 c4096": [4096],
    "b1 c32768": [32768],
    "b1 c131072": [131072],
    "b8 c640": [640] * 8,
    "b32 c256": [256] * 32,
    "b32 c1024": [1024] * 32,
    "b32 ragged 100-1924": ragged(32, 100, 1924),
    "b128 c640": [640] * 128,
    "b128 ragged 100-1924": ragged(128, 100, 1924),
    "b256 c640": [640] * 256,
    "b256 ragged 100-1924": ragged(256, 100, 1924),
}
PREFILL = {
    "1x512": [512],
    "1x2048": [2048],
    "1x8192": [8192],
    "8x1024": [1024] * 8,
    "32x1024": [1024] * 32,
    "16x ragged 100-1924": ragged(16, 100, 1924),
}


def rows(kernels: Any, full: bool = True) -> list[tuple[str, dict[str, float]]]:
    """All rows: (name, figures)."""
    result = [(f"decode {name}", decode_row(kernels, lengths)) for name, lengths in DECODE.items()]
    if full:
        b32 = [1024] * 32
        result += [(f"decode b32 c1024 block {n}", decode_row(kernels, b32, block_size=n)) for n in (16, 1)]
        result.append(("decode b32 c1024 dim 128", decode_row(kernels, b32, head_dim=128)))
        result.append(("decode b32 c1024 dim 128 28/4", decode_row(kernels, b32, (28, 4), 128)))
        result.append(("decode b32 c1024 8/8", decode_row(kernels, b32, (8, 8))))
    result += [(f"prefill {name}", prefill_row(kernels, lengths)) for name, lengths in PREFILL.items()]
    if full:
        result.append(("prefill 1x8192 dim 128", prefill_row(kernels, [8192], head_dim=128)))
        result.append(("prefill 1x8192 block 16", prefill_row(kernels, [8192], block_size=16, baselines=False)))
        result.append(("prefill 1x4096 block 1", prefill_row(kernels, [4096], block_size=1, baselines=False)))
    return result


def show(kernels: Any) -> None:
    """Print every row."""
    print(torch.cuda.get_device_name())
    for name, row in rows(kernels):
        figures = "  ".join(f"{k} {v:.3f}" if v < 10 else f"{k} {v:.1f}" for k, v in row.items())
        print(f"{name:32s} {figures}", flush=True)
