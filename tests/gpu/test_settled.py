"""Attention and rope that read early what is settled: the new keys and values must not be among it."""

from __future__ import annotations

import math

import pytest
import torch
from rows import CUDA, DIM, random, same_bits
from tensors import angles
from torch import Tensor

from minivllm import ops

pytestmark = pytest.mark.gpu

LAYERS, HEADS, KV_HEADS = 4, 8, 2
LONGEST = 2200


def begin(first: str, weight: Tensor, ids: Tensor, in_graph: bool = False) -> None:
    """Look ids up, as a forward pass begins: after it all that was in the stream before has ended."""
    if first == "embedding":
        ops.embedding(weight, ids, first=in_graph)
    else:
        ops.embed_and_weigh(weight, weight[0], ids, first=in_graph)


def step(
    first: str,
    settled: bool,
    caches: Tensor,
    table: Tensor,
    slots: Tensor,
    lens: Tensor,
    qkvs: list[Tensor],
    workspace: Tensor,
) -> list[Tensor]:
    """Queue a few layers' rope and attention behind an embedding, as a model does, with nothing in between."""
    cos_sin, positions = angles(DIM, LONGEST, CUDA), lens - 1
    ids = torch.zeros(len(lens), dtype=torch.int32, device=CUDA)
    weight = random(4, 64)
    outs = [torch.full((len(lens), HEADS, DIM), math.nan, device=CUDA).bfloat16() for _ in qkvs]
    begin(first, weight, ids)
    for cache, qkv, out in zip(caches, qkvs, outs, strict=True):
        q = ops.rope_kv(qkv, cos_sin, positions, slots, table, cache, HEADS, settled=settled)
        ops.decode_attention(q, cache, table, slots, lens, LONGEST, DIM**-0.5, workspace, out, settled=settled)
    torch.cuda.synchronize()
    return outs


@pytest.mark.parametrize("first", ["embedding", "embed_and_weigh"])
@pytest.mark.parametrize("block_size", [13, 16, 64])
@pytest.mark.parametrize("rows", [1, 3, 20, 70, 200])
def test_settled_changes_nothing(rows: int, block_size: int, first: str) -> None:
    torch.manual_seed(rows)
    a_row = -(-LONGEST // block_size)
    table = torch.randperm(rows * a_row, device=CUDA).int().view(rows, a_row)
    slots = torch.arange(rows, dtype=torch.int32, device=CUDA)
    if rows > 3:
        slots[rows // 2 :: 7] = -1
    drawn = torch.randn(LAYERS, rows * a_row, 2, KV_HEADS, block_size, DIM, device=CUDA).bfloat16()
    workspace = ops.attention_workspace(rows, LONGEST, HEADS, DIM, CUDA)
    assert workspace is not None
    for longest in (60, 300, 1000, LONGEST):
        lens = torch.randint(1, longest + 1, (rows,), device=CUDA, dtype=torch.int32)
        last = (lens - 1).long()
        blocks = table[torch.arange(rows, device=CUDA), last // block_size].long()
        before = drawn.clone()
        before[:, blocks, :, :, last % block_size] = math.nan  # a new token's place, read too early, is seen
        qkvs = [random(rows, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(LAYERS)]
        expected = step(first, False, before.clone(), table, slots, lens, qkvs, workspace)
        for _ in range(3):
            found = step(first, True, before.clone(), table, slots, lens, qkvs, workspace)
            for a, b in zip(found, expected, strict=True):
                assert a[slots >= 0].isfinite().all()
                assert same_bits(a, b)


@pytest.mark.parametrize("first", ["embedding", "embed_and_weigh"])
def test_a_graph_is_replayed_with_other_rows(first: str) -> None:
    """What a step reads early lies where it lay in the step before: lengths, slots and tables change in place."""
    torch.manual_seed(2)
    rows, block_size, a_row = 12, 64, -(-LONGEST // 64)
    drawn = torch.randn(rows * a_row, 2, KV_HEADS, block_size, DIM, device=CUDA).bfloat16()
    cache, workspace = drawn.clone(), ops.attention_workspace(rows, LONGEST, HEADS, DIM, CUDA)
    lens, slots = (torch.ones(rows, dtype=torch.int32, device=CUDA) for _ in range(2))
    positions = torch.zeros(rows, dtype=torch.int32, device=CUDA)
    table = torch.zeros(rows, a_row, dtype=torch.int32, device=CUDA)
    qkv, weight, cos_sin = random(rows, (HEADS + 2 * KV_HEADS) * DIM), random(4, 64), angles(DIM, LONGEST, CUDA)
    staged = [torch.empty(x.shape, dtype=torch.int32, pin_memory=True) for x in (lens, slots, positions, table)]

    def run(settled: bool, in_graph: bool = False) -> Tensor:
        begin(first, weight, slots, in_graph)
        q = ops.rope_kv(qkv, cos_sin, positions, slots, table, cache, HEADS, settled=settled)
        return ops.decode_attention(q, cache, table, slots, lens, LONGEST, DIM**-0.5, workspace, settled=settled)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(True)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = run(True, in_graph=True)
        for length in (62, 63, 64, 65, 66, 127, 128, 129, 255, 256, 257, 258, 1023, 1024, 1025, 1026, 2176, 2177):
            lengths = torch.tensor([max(1, length - i) for i in range(rows)], dtype=torch.int32)
            order = torch.randperm(rows * a_row, dtype=torch.int32).view(rows, a_row)
            some = torch.randperm(rows, dtype=torch.int32)
            last = lengths - 1
            poisoned = drawn.clone()
            blocks = order[some.long(), last.long() // block_size].long().to(CUDA)
            poisoned[blocks, :, :, (last.long() % block_size).to(CUDA)] = math.nan
            cache.copy_(poisoned)
            for to, host, value in zip(
                (lens, slots, positions, table), staged, (lengths, some, last, order), strict=True
            ):
                host.copy_(value)
                to.copy_(host, non_blocking=True)
            graph.replay()
            found = out.clone()
            cache.copy_(poisoned)
            assert found.isfinite().all(), length
            assert same_bits(found, run(False)), length
