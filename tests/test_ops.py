"""Each operation against torch in float64: odd sizes, strided inputs, memory that was never written.

An error may be twice that of plain torch in the operation's own dtype, both against float64. What the
engine promises is bitwise: a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import reference
import torch
from tensors import NO_BLOCK, Pool, angles, apart, assert_near, in_double, ints, rand
from torch import Tensor

from minivllm import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(24, 8), (14, 2), (28, 4), (40, 8), (9, 3), (8, 8), (8, 1)]
# Every grouping of heads in one dtype, and the other dtypes in one grouping.
MODELS = [(torch.bfloat16, heads) for heads in HEADS] + [(torch.float32, (9, 3)), (torch.float16, (9, 3))]
models = pytest.mark.parametrize(("dtype", "heads"), MODELS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@dtypes
@pytest.mark.parametrize("hidden", [8, 72, 576])
def test_embedding(device, dtype, hidden):
    weight = rand(101, hidden, dtype=dtype, device=device)
    state = torch.full((5, 7), NO_BLOCK, dtype=torch.int32, device=device)
    state[:, 3] = ints([100, 0, 17, 2**31 - 1, -5], device)  # two of them outside the vocabulary
    ids = ints([0, 100, -1, -1, -1, -1, -1, 101, -7], device)
    slots = ints([4, -1, 0, 2, 3, 4, -1, 1, 1], device)
    found = ops.embedding(weight, ids, slots, state[:, 3])
    assert torch.equal(found, reference.embedding(weight, ids, slots, state[:, 3]))
    assert torch.equal(ops.embedding(weight, ids[:2]), weight[[0, 100]])


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("hidden", [8, 72, 576, 2048])
def test_rms_norm(device, dtype, rows, hidden):
    x = rand(rows, hidden, dtype=dtype, device=device)
    weight = rand(hidden, dtype=dtype, device=device)
    truth = reference.rms_norm(*in_double(x, weight), 1e-5)
    plain = reference.rms_norm(x, weight, 1e-5)
    found = ops.rms_norm(apart(x), weight, 1e-5)
    assert_near(found, truth, plain)
    assert torch.equal(ops.rms_norm(x[-1:], weight, 1e-5), found[-1:])

    residual = rand(rows, hidden, dtype=dtype, device=device)
    added = residual + x
    found = ops.rms_norm(apart(x), weight, 1e-5, residual)
    assert torch.equal(residual, added)
    assert torch.equal(found, ops.rms_norm(added, weight, 1e-5))


def test_rms_norm_of_zeros_is_zero(device):
    zeros = torch.zeros(2, 64, device=device)
    assert torch.equal(ops.rms_norm(zeros, zeros[0] + 1, 1e-6), zeros)


@dtypes
@pytest.mark.parametrize("size", [8, 40, 1536])
def test_silu_mul(device, dtype, size):
    x = rand(7, 2 * size, dtype=dtype, device=device) * 4
    found = ops.silu_mul(apart(x))
    assert_near(found, reference.silu_mul(x.double()), reference.silu_mul(x))
    assert torch.equal(ops.silu_mul(x[3:4]), found[3:4])


def test_silu_of_the_largest_numbers_is_finite(device):
    x = torch.tensor([[-3e38, -1e4, -90.0, 0.0, 90.0, 1e4, 3e38, 1.0] + [1.0] * 8], device=device)
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x))


@dtypes
@pytest.mark.parametrize("kind", ["plain", "bias", "residual", "gate_up", "gate_up_bias", "logits"])
@pytest.mark.parametrize(("n", "k"), [(576, 576), (192, 1536), (50, 33), (16, 64)])
def test_linear(device, dtype, kind, n, k):
    weight = rand(n, k, dtype=dtype, device=device) / math.sqrt(k)
    bias = rand(n, dtype=dtype, device=device) if "bias" in kind else None
    layer = ops.Linear(weight, bias, gate_up="gate_up" in kind)
    out_dtype = torch.float32 if kind == "logits" else None
    for rows in (1, 3, 8, 21, 70):
        x = rand(rows, k, dtype=dtype, device=device)
        residual = rand(rows, n, dtype=dtype, device=device) if kind == "residual" else None
        inputs = (x, weight, bias, residual)
        truth = reference.linear(*in_double(*inputs), gate_up=layer.gate_up)
        if dtype != torch.float32:  # on the CPU: racecheck breaks inside cuBLAS' products of 16 bits
            inputs = [None if t is None else t.cpu() for t in inputs]
        plain = reference.linear(*inputs, gate_up=layer.gate_up).to(device)
        given = None if residual is None else residual.clone()
        found = layer(x if k == 33 else apart(x), residual=given, out_dtype=out_dtype)
        assert found.dtype == (out_dtype or dtype)
        assert given is None or found is given
        assert_near(found, truth, plain)
        for row in (0, rows - 1):
            alone = None if residual is None else residual[row : row + 1].clone()
            one = layer(x[row : row + 1], residual=alone, out_dtype=out_dtype)
            assert torch.equal(one, found[row : row + 1])


def test_linear_writes_where_it_is_told(device):
    layer = ops.Linear(rand(64, 64, dtype=torch.bfloat16, device=device))
    x = rand(5, 64, dtype=torch.bfloat16, device=device)
    room = torch.full((9, 64), math.nan, device=device)
    assert layer(x, out_dtype=torch.float32, out=room[:5]).data_ptr() == room.data_ptr()
    assert torch.equal(room[:5], layer(x, out_dtype=torch.float32))
    assert room[5:].isnan().all()
    with pytest.raises(ValueError, match="plain products"):
        layer(x, residual=rand(5, 64, dtype=torch.bfloat16, device=device), out=room[:5])


def test_linear_keeps_a_nan_in_its_row(device):
    layer = ops.Linear(rand(64, 64, dtype=torch.bfloat16, device=device))
    x = rand(9, 64, dtype=torch.bfloat16, device=device)
    clean = layer(x)
    x[4, 7] = math.nan
    found = layer(x)
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 3, 5, 8]], clean[[0, 3, 5, 8]])


@models
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_rope_kv(device, dtype, normed, head_dim, heads):
    (num_q_heads, num_kv_heads), eps = heads, 1e-6
    pool = Pool(device, dtype, [40, 7], num_kv_heads, head_dim, 8)
    rows = [(0, 39), (1, 6), (0, 0), (-1, 3), (1, 2), (-1, 10**9), (0, 8)]
    slots = ints([slot for slot, _ in rows], device)
    positions = ints([position for _, position in rows], device)
    qkv = rand(len(rows), (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    norms = [rand(head_dim, dtype=dtype, device=device) for _ in "qk"] if normed else [None, None]
    cos_sin = angles(head_dim, 64, device)
    q = ops.rope_kv(apart(qkv), cos_sin, positions, slots, pool.table, pool.cache, num_q_heads, *norms, eps)

    def rotated(qkv: Tensor, norms: list[Tensor | None]) -> list[Tensor]:
        parts = reference.split_qkv(qkv, num_q_heads, num_kv_heads, head_dim)[:2]
        for part, norm in zip(parts, norms, strict=True):
            part = part if norm is None else reference.rms_norm(part, norm, eps)
            yield reference.rotate(part, cos_sin, positions.clamp(max=63))

    kept = [i for i, (slot, _) in enumerate(rows) if slot >= 0]
    blocks = pool.table[slots[kept].long(), positions[kept].long() // 8].long()
    written = pool.cache[blocks, :, :, positions[kept].long() % 8]
    truth_q, truth_k = rotated(qkv.double(), in_double(*norms))
    plain_q, plain_k = rotated(qkv, norms)
    assert_near(q[kept], truth_q[kept], plain_q[kept])
    assert_near(written[:, 0], truth_k[kept], plain_k[kept])
    assert torch.equal(written[:, 1], reference.split_qkv(qkv, num_q_heads, num_kv_heads, head_dim)[2][kept])
    pool.cache[blocks, :, :, positions[kept].long() % 8] = math.nan
    assert pool.cache.isnan().all(), "something else was written"


def prefill(pool: Pool, q: Tensor, slots, seq_lens, q_lens, scale: float) -> Tensor:
    device = q.device
    starts = [0, *torch.tensor(q_lens).cumsum(0).tolist()]
    return ops.prefill_attention(
        q, pool.cache, pool.table, ints(slots, device), ints(seq_lens, device), ints(starts, device),
        max(q_lens), max(seq_lens), scale,
    )  # fmt: skip


def decode(pool: Pool, q: Tensor, slots, seq_lens, scale: float) -> Tensor:
    bound = max(seq_lens)
    workspace = ops.attention_workspace(q.shape[0], bound, q.shape[1], q.shape[2], q.device)
    return ops.decode_attention(
        q, pool.cache, pool.table, ints(slots, q.device), ints(seq_lens, q.device), bound, scale, workspace
    )


@models
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_attention(device, dtype, head_dim, heads):
    check_attention(device, dtype, heads, head_dim, 16)


@dtypes
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 5), (16, 1), (32, 16), (40, 256), (256, 5)])
def test_attention_of_odd_sizes_on_the_cpu(dtype, head_dim, block_size):
    check_attention(torch.device("cpu"), dtype, (4, 2), head_dim, block_size)


def check_attention(device, dtype, heads, head_dim, block_size):
    num_q_heads, num_kv_heads = heads
    seq_lens, q_lens, scale = [1, 33, 300, 64, 65], [1, 33, 9, 1, 40], head_dim**-0.5
    pool = Pool(device, dtype, seq_lens, num_kv_heads, head_dim, block_size)
    kv = [pool.fill(slot, n) for slot, n in enumerate(seq_lens)]
    order = [3, 0, 4, 2, 1]
    q = [rand(n, num_q_heads, head_dim, dtype=dtype, device=device) for n in q_lens]
    found = prefill(
        pool, torch.cat([q[i] for i in order]), order, [seq_lens[i] for i in order],
        [q_lens[i] for i in order], scale,
    )  # fmt: skip
    for i, rows in zip(order, found.split([q_lens[i] for i in order]), strict=True):
        truth = reference.attention(*in_double(q[i], *kv[i]), scale)
        assert_near(rows, truth, reference.attention(q[i], *kv[i], scale))
    last = torch.cat([q[i][-1:] for i in order])
    together = decode(pool, last, order, [seq_lens[i] for i in order], scale)
    ends = torch.tensor([q_lens[i] for i in order]).cumsum(0) - 1
    assert torch.equal(together, found[ends.to(device)])
    for row, i in enumerate(order):
        assert torch.equal(decode(pool, last[row : row + 1], [i], [seq_lens[i]], scale)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["bfloat16", "float16"])
def test_attention_in_one_shot_in_chunks_and_by_decode(device, dtype):
    seq_len, scale = 600, 0.125
    pool = Pool(device, dtype, [seq_len], 3, 64, 16)
    pool.fill(0, seq_len)
    q = rand(seq_len, 9, 64, dtype=dtype, device=device)
    whole = prefill(pool, q, [0], [seq_len], [seq_len], scale)
    cuts = [0, 1, 18, 64, 65, 129, 256, 400, seq_len]
    for begin, end in pairwise(cuts):
        assert torch.equal(prefill(pool, q[begin:end], [0], [end], [end - begin], scale), whole[begin:end])
    for n in (600, 513, 512, 511, 257, 256, 255, 65, 64, 63, 16, 2, 1):
        # What lies behind a row's end must not matter.
        rest = torch.full((seq_len - n, 3, 64), math.nan, dtype=dtype, device=device)
        reference.write_kv(pool.cache, pool.table, 0, n, rest, rest)
        assert torch.equal(decode(pool, q[n - 1 : n], [0], [n], scale), whole[n - 1 : n])


def test_attention_leaves_padding_out(device):
    pool = Pool(device, torch.bfloat16, [20, 20], 2, 64, 16)
    pool.fill(0, 20), pool.fill(1, 20)
    q = rand(3, 4, 64, dtype=torch.bfloat16, device=device)
    found = decode(pool, q, [1, -1, 0], [20, 5, 20], 0.125)
    assert torch.equal(found[[0, 2]], decode(pool, q[[0, 2]], [1, 0], [20, 20], 0.125))


def test_scores_of_any_size_give_finite_weights(device):
    pool = Pool(device, torch.float32, [100], 1, 64, 16)
    k, v = pool.fill(0, 100)
    q = rand(1, 1, 64, dtype=torch.float32, device=device) * 1e4
    found = decode(pool, q, [0], [100], 1.0)
    torch.testing.assert_close(found, reference.attention(q, k, v, 1.0))


def every_op(dtype: torch.dtype) -> list[Tensor]:
    """Return one result of each kernel that is compiled for several instruction sets."""
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    pool = Pool(cpu, dtype, [150], 2, 40, 16)
    pool.fill(0, 150)
    x, weight = rand(9, 150, dtype=dtype, device=cpu), rand(70, 150, dtype=dtype, device=cpu) / 12
    qkv = rand(1, 8 * 40, dtype=dtype, device=cpu)
    at = (ints([149], cpu), ints([0], cpu))
    q = ops.rope_kv(qkv, angles(40, 150, cpu), *at, pool.table, pool.cache, 4)
    attended = decode(pool, q, [0], [150], 0.2)
    gated = ops.Linear(weight, gate_up=True)(x)
    return [ops.Linear(weight)(x), gated, ops.rms_norm(x, x[0], 1e-5), ops.silu_mul(x), q, attended]


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_each_instruction_set_gives_the_same_within_rounding(isa, tmp_path):
    code = (
        "import sys, torch, test_ops; torch.save([test_ops.every_op(dtype) for dtype in test_ops.DTYPES], sys.argv[1])"
    )
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = os.environ | {"MINIVLLM_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "found")], env=environment, check=True)
    for dtype, results in zip(DTYPES, torch.load(tmp_path / "found"), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        for found, here in zip(results, every_op(dtype), strict=True):
            torch.testing.assert_close(found, here, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_a_cache_past_two_billion_elements():
    device, shape = torch.device("cuda"), (2**31 // (2 * 8 * 16 * 64) + 2, 2, 8, 16, 64)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    last = shape[0] - 1
    table = ints([last], device)[None]
    qkv = rand(1, 24 * 64, dtype=torch.bfloat16, device=device)
    zero = ints([0], device)
    q = ops.rope_kv(qkv, angles(64, 8, device), zero, zero, table, cache, 8)
    assert torch.equal(cache[last, 1, :, 0].flatten(), qkv[0, 16 * 64 :])
    workspace = ops.attention_workspace(1, 1, 8, 64, device)
    found = ops.decode_attention(q, cache, table, zero, ints([1], device), 1, 0.125, workspace)
    assert torch.equal(found.flatten(), qkv[0, 16 * 64 :])  # one key has all the weight
    starts = ints([0, 1], device)
    found = ops.prefill_attention(q, cache, table, zero, ints([1], device), starts, 1, 1, 0.125)
    assert torch.equal(found.flatten(), qkv[0, 16 * 64 :])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, i: ops.rms_norm(x, x[0, :5], 1e-5), r"weight must have the shape \[hidden_size\] = \[8\]"),
        (lambda x, i: ops.rms_norm(x.t(), x[:, 0], 1e-5), "x must have contiguous rows"),
        (lambda x, i: ops.rms_norm(x, x[0].half(), 1e-5), "weight must be Float, not Half"),
        (lambda x, i: ops.embedding(x, i.long()), "token_ids must be Int, not Long"),
        (lambda x, i: ops.silu_mul(x[:, :5]), r"x must have the shape \[num_tokens, two_sizes\]"),
        (lambda x, i: ops.Linear(x)(x[:, :4]), r"weight must have the shape"),
        (lambda x, i: ops.Linear(x)(x, residual=x[:2]), r"out must have the shape \[num_tokens, out_size\]"),
        (lambda x, i: ops.update_state(i, i.view(-1, 1)), r"pairs must have the shape \[num_pairs, two\]"),
    ],
)
def test_a_wrong_argument_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int32))


def test_no_rows_give_no_rows(device):
    x = torch.zeros(0, 64, device=device)
    assert ops.rms_norm(x, torch.ones(64, device=device), 1e-5).shape == (0, 64)
    assert ops.silu_mul(x).shape == (0, 32)
    assert ops.Linear(torch.zeros(8, 64, device=device))(x).shape == (0, 8)
