"""Products with rope and with halves of norms: near the truth, and the same bits for any number of rows."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from rows import BLOCK, CUDA, DIM, EPS, assert_rows_near, matrix, near_one, random, same_bits
from tensors import NO_BLOCK, angles
from torch import Tensor

from minivllm import _extension, ops

pytestmark = pytest.mark.gpu

_C = _extension.load()
TOKENS = [1, 3, 8, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 257, 700, 2100]
MOST = max(TOKENS)
JOINED = 64  # rows up to which a product does what comes between it and the next
# hidden size, query heads, key heads, intermediate size: chains in chunks of K, and one chain.
SIZES = [(2048, 32, 8, 8192), (576, 9, 3, 1536)]
sizes = pytest.mark.parametrize(("hidden", "num_q", "num_kv", "inter"), SIZES)


@pytest.fixture(autouse=True)
def seeded(on_hopper: None) -> None:
    torch.manual_seed(0)


def square_sums_of(rows: Tensor) -> Tensor:
    """Add in the order of cuda/split_norm.cuh; squares of half-precision numbers are exact in float32."""
    x = rows.float().view(rows.shape[0], -1, 8, 4, 2)
    pairs = x[..., 0] * x[..., 0] + x[..., 1] * x[..., 1]  # [rows, sums, 8, 4]
    for _ in range(3):
        pairs = pairs[:, :, 0::2] + pairs[:, :, 1::2]
    q = pairs[:, :, 0]
    return (q[..., 0] + q[..., 1]) + (q[..., 2] + q[..., 3])


def in_order(sums: Tensor) -> Tensor:
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return total


def some(tokens: int) -> Tensor:
    return torch.randperm(MOST, device=CUDA)[:tokens]


def take(rows: ops.Weighed, mine: Tensor) -> ops.Weighed:
    return ops.Weighed(rows.x[mine], rows.square_sums[mine])


# ---------------------------------------------------------------- weigh_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [64, 192, 576, 2048, 4160, 8192, 8256, 16384])
def test_weigh_rows(hidden: int, dtype: torch.dtype) -> None:
    weight = near_one(hidden, dtype)
    for rows in (1, 3, 130, 1027):
        residual = random(rows, hidden, dtype=dtype)
        before = residual.clone()
        weighed = ops.weigh_rows(residual, weight)
        assert same_bits(residual, before)
        assert same_bits(weighed.x, (before.float() * weight.float()).to(dtype))
        assert same_bits(weighed.square_sums, square_sums_of(before))
        sums = torch.randn(3, rows, hidden, device=CUDA)
        weighed = ops.weigh_rows(residual, weight, sums)
        after = (before.float() + in_order(sums)).to(dtype)
        assert same_bits(residual, after)
        assert same_bits(weighed.x, (after.float() * weight.float()).to(dtype))
        assert same_bits(weighed.square_sums, square_sums_of(after))
        normed = before.clone()
        ops.rms_norm(normed, weight, EPS, partials=sums)
        assert same_bits(normed, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [64, 576, 2048, 8256])
def test_embed_and_weigh(hidden: int, dtype: torch.dtype) -> None:
    weight, norm = random(300, hidden, dtype=dtype), near_one(hidden, dtype)
    state = torch.randint(0, 300, (7, 5), device=CUDA, dtype=torch.int32)
    for rows in (1, 3, 130, 1024, 1025, 1030):
        ids = torch.randint(-1, 302, (rows,), device=CUDA, dtype=torch.int32)
        slots = torch.randint(-1, 7, (rows,), device=CUDA, dtype=torch.int32)
        for places in [(), (slots, state[:, 2])]:
            residual, weighed = ops.embed_and_weigh(weight, norm, ids, *places)
            expected = ops.embedding(weight, ids, *places)
            assert same_bits(residual, expected)
            assert same_bits(weighed.x, ops.weigh_rows(expected, norm).x)
            assert same_bits(weighed.square_sums, square_sums_of(expected))


def test_another_order_of_a_square_sum_has_other_bits() -> None:
    residual = random(500, 2048)
    found = ops.weigh_rows(residual, near_one(2048)).square_sums
    straight = torch.zeros(500, 32, device=CUDA)
    for column in range(64):
        straight += residual.float().view(500, 32, 64)[..., column] ** 2
    torch.testing.assert_close(found, straight, rtol=1e-5, atol=0)
    assert not torch.equal(found, straight)


# ---------------------------------------------------------------- residual + first half


@sizes
@pytest.mark.parametrize("which", ["o", "down"])
def test_add_and_weigh(which: str, hidden: int, num_q: int, num_kv: int, inter: int) -> None:
    k = num_q * DIM if which == "o" else inter
    linear, norm = ops.Linear(matrix(hidden, k)), near_one(hidden)
    x, before = random(MOST, k), random(MOST, hidden)
    whole = linear(x, residual=before.clone())
    weighed = ops.weigh_rows(whole, norm)
    assert_rows_near(
        whole, before.float() + x.float() @ linear.weight.float().T, torch.addmm(before, x, linear.weight.T)
    )
    assert same_bits(weighed.x, (whole.float() * norm.float()).bfloat16())
    assert same_bits(weighed.square_sums, square_sums_of(whole))
    for tokens in TOKENS:
        mine = some(tokens)
        for joined in (True, False):
            if joined and tokens > JOINED and linear.num_chunks == 1:
                continue
            residual = before[mine]
            if joined:
                found = linear.add_and_weigh(residual, x[mine], norm)
            else:  # by a kernel of its own, to which up to 256 rows' sums are left
                found = ops.weigh_rows(residual, norm, linear.add_to(residual, x[mine]))
            assert same_bits(residual, whole[mine]), tokens
            assert same_bits(found.x, weighed.x[mine]), tokens
            assert same_bits(found.square_sums, weighed.square_sums[mine]), tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "tokens"), [(64, 65), (320, 130), (320, 300), (512, 257), (8000, 400)])
def test_wide_tiles_weigh(columns: int, tokens: int, dtype: torch.dtype) -> None:
    linear, norm = ops.Linear(random(columns, 2048, scale=2048**-0.5, dtype=dtype)), near_one(columns, dtype)
    x, before = random(tokens, 2048, dtype=dtype), random(tokens + 1, columns, dtype=dtype)
    whole = linear(x, residual=before[:tokens].clone())
    expected = ops.weigh_rows(whole, norm)
    # Rows that are apart are for wide tiles however many there are; those that are not, where the product wants such.
    for room in (before.clone(), torch.cat([before, before], 1)[:, :columns]):
        found = linear.add_and_weigh(room[:tokens], x, norm)
        assert same_bits(room[:tokens].contiguous(), whole)
        assert same_bits(room[tokens], before[tokens])
        assert same_bits(found.x, expected.x)
        assert same_bits(found.square_sums, expected.square_sums)


@pytest.mark.parametrize("tokens", [1, 40, 130, 300])
def test_what_is_given_is_written_to(tokens: int) -> None:
    linear, norm = ops.Linear(matrix(2048, 2048)), near_one(2048)
    x, before = random(tokens, 2048), random(tokens, 2048)
    residual = before.clone()
    expected = linear.add_and_weigh(residual, x, norm)
    out = ops.Weighed(torch.full_like(expected.x, math.nan), torch.full_like(expected.square_sums, math.nan))
    assert linear.add_and_weigh(before.clone(), x, norm, out) is out
    assert same_bits(out.x, expected.x) and same_bits(out.square_sums, expected.square_sums)
    out.x.fill_(math.nan)
    assert ops.weigh_rows(residual, norm, out=out) is out
    assert same_bits(out.x, expected.x)
    sums = linear.empty_sums(x).fill_(math.nan)
    begun = linear.begin(x, sums)
    assert (begun is sums) == linear.leaves_sums(x)
    assert same_bits(begun, linear.begin(x))


def test_add_and_weigh_with_a_bias() -> None:
    linear, norm = ops.Linear(matrix(2048, 2048), random(2048)), near_one(2048)
    for tokens in (1, 17, 40, 64):
        x, before = random(tokens, 2048), random(tokens, 2048)
        residual, plain = before.clone(), linear(x, residual=before.clone())
        found = linear.add_and_weigh(residual, x, norm)
        assert same_bits(residual, plain)
        assert same_bits(found.square_sums, square_sums_of(plain))
        assert same_bits(found.x, (plain.float() * norm.float()).bfloat16())


def test_nothing_is_written_outside_the_rows() -> None:
    linear, norm = ops.Linear(matrix(2048, 2048)), near_one(2048)
    for tokens in (1, 7, 16, 17, 33, 63, 64, 65, 129, 300):
        # Rows that are apart: past 64 wide tiles take them.
        both = torch.full((tokens + 64, 4096), math.nan, device=CUDA, dtype=torch.bfloat16)
        room = both[:, :2048]
        room[:tokens] = random(tokens, 2048)
        x = torch.full((tokens + 64, 2048), math.nan, device=CUDA, dtype=torch.bfloat16)
        sums = torch.full((tokens + 64, 32), math.nan, device=CUDA)
        given = random(tokens, 2048)
        written = (room[:tokens], x[:tokens], sums[:tokens])
        _C.linear_residual_norm(*written, given, linear.weight, norm, None, linear.num_chunks)
        for part in (room, x, sums):
            assert part[:tokens].isfinite().all(), tokens
            assert part[tokens:].isnan().all(), tokens
        assert both[:, 2048:].isnan().all(), tokens


@pytest.mark.parametrize("k", [576, 2048])
def test_nothing_times_a_negative_weight_has_one_sign(k: int) -> None:
    """A chain of zeros with a minus comes out alike whether it starts by adding to zero or by overwriting."""
    linear = ops.Linear(-matrix(1024, k).abs())
    x = torch.zeros(MOST, k, device=CUDA, dtype=torch.bfloat16)
    whole = linear(x, out_dtype=torch.float32)
    for tokens in TOKENS:
        assert same_bits(linear(x[:tokens], out_dtype=torch.float32), whole[:tokens]), tokens
        if linear.leaves_sums(x[:tokens]):
            assert same_bits(in_order(linear.begin(x[:tokens])), whole[:tokens]), tokens


# ---------------------------------------------------------------- second half + SiLU


# The last is small, and comes by all instances that are for this alone.
@pytest.mark.parametrize(
    ("hidden", "inter", "biased"), [(2048, 8192, False), (2048, 8192, True), (576, 1536, False), (128, 8192, False)]
)
def test_gate_up(hidden: int, inter: int, biased: bool) -> None:
    halves, norm, bias = matrix(2 * inter, hidden), near_one(hidden), random(2 * inter) if biased else None
    linear = ops.Linear(halves, bias, gate_up=True)
    residual = random(MOST, hidden) * torch.rand(MOST, 1, device=CUDA).mul(8).exp2().bfloat16()
    rows = ops.weigh_rows(residual, norm)
    whole = linear(rows.x, square_sums=rows.square_sums, eps=EPS)
    plain = linear(ops.rms_norm(residual, norm, EPS))
    normed = reference.rms_norm(residual.float(), norm.float(), EPS)
    truth = normed @ halves.float().T + (0 if bias is None else bias.float())
    assert_rows_near(whole, reference.silu_mul(truth), plain)
    for tokens in TOKENS:
        mine = some(tokens)
        part = take(rows, mine)
        assert same_bits(linear(part.x, square_sums=part.square_sums, eps=EPS), whole[mine]), tokens
    assert not torch.equal(linear(rows.x), whole)


@pytest.mark.parametrize("biased", [False, True])
def test_a_plain_product_divides_before_the_bias(biased: bool) -> None:
    norm, bias = near_one(2048), random(3072) if biased else None
    linear = ops.Linear(matrix(3072, 2048), bias)
    residual = 3 * random(MOST, 2048)
    rows = ops.weigh_rows(residual, norm)
    whole = linear(rows.x, square_sums=rows.square_sums, eps=0.5)  # an eps that is seen
    normed = reference.rms_norm(residual.float(), norm.float(), 0.5)
    truth = normed @ linear.weight.float().T + (0 if bias is None else bias.float())
    assert_rows_near(whole, truth, linear(ops.rms_norm(residual, norm, 0.5)))
    for tokens in TOKENS:
        part = take(rows, mine := some(tokens))
        assert same_bits(linear(part.x, square_sums=part.square_sums, eps=0.5), whole[mine]), tokens


# ---------------------------------------------------------------- second half + rope + blocks


class Blocks:
    """A cache full of NaN, and two slots whose blocks lie in any order."""

    def __init__(self, num_kv: int, block_size: int = BLOCK) -> None:
        self.block_size, per_slot = block_size, -(-MOST // block_size)
        self.cache = torch.full((2 * per_slot + 3, 2, num_kv, block_size, DIM), math.nan, device=CUDA).bfloat16()
        order = torch.randperm(len(self.cache), device=CUDA).int()[: 2 * per_slot].view(2, per_slot)
        wide = torch.full((2, 16 + per_slot + 2), NO_BLOCK, device=CUDA, dtype=torch.int32)
        wide[:, 16 : 16 + per_slot] = order
        self.table = wide[:, 16 : 16 + per_slot]

    def at(self, slots: Tensor, positions: Tensor, cache: Tensor | None = None) -> Tensor:
        """Return keys and values of tokens, ``[num_tokens, 2, num_kv, DIM]``."""
        blocks = self.table[slots.long(), positions.long() // self.block_size].long()
        return (self.cache if cache is None else cache)[blocks, :, :, positions.long() % self.block_size]


def rope_truth(qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_q: int, num_kv: int) -> tuple[Tensor, Tensor]:
    q, k, v = reference.split_qkv(qkv, num_q, num_kv, DIM)
    q, k = (reference.rotate(x, cos_sin, positions) for x in (q, k))
    return q, torch.stack([k, v], dim=1)


@sizes
@pytest.mark.parametrize("biased", [False, True])
def test_rope_kv(biased: bool, hidden: int, num_q: int, num_kv: int, inter: int) -> None:
    n = (num_q + 2 * num_kv) * DIM
    norm, bias = near_one(hidden), random(n) if biased else None
    linear, cos_sin = ops.Linear(matrix(n, hidden), bias), angles(DIM, MOST, CUDA)
    residual = random(MOST, hidden) * torch.rand(MOST, 1, device=CUDA).mul(8).exp2().bfloat16()
    rows = ops.weigh_rows(residual, norm)
    positions = torch.randperm(MOST, device=CUDA).int()
    slots = torch.randint(0, 2, (MOST,), device=CUDA, dtype=torch.int32)
    blocks = Blocks(num_kv)
    poison = blocks.cache.clone()
    y = linear(rows.x, square_sums=rows.square_sums, eps=EPS)
    whole_q = ops.rope_kv(y, cos_sin, positions, slots, blocks.table, blocks.cache, num_q)
    whole_kv = blocks.at(slots, positions)

    plain_cache = poison.clone()
    qkv = linear(ops.rms_norm(residual, norm, EPS))
    plain_q = ops.rope_kv(qkv, cos_sin, positions, slots, blocks.table, plain_cache, num_q)
    normed = reference.rms_norm(residual.float(), norm.float(), EPS)
    y = normed @ linear.weight.float().T + (0 if bias is None else bias.float())
    true_q, true_kv = rope_truth(y, cos_sin, positions, num_q, num_kv)
    assert_rows_near(whole_q, true_q, plain_q)
    plain_kv = blocks.at(slots, positions, plain_cache)
    for i in range(2):
        assert_rows_near(whole_kv[:, i], true_kv[:, i], plain_kv[:, i])
    assert torch.equal(blocks.cache.isfinite(), plain_cache.isfinite())

    for tokens in TOKENS:
        mine = some(tokens)
        blocks.cache = poison.clone()
        given = (cos_sin, positions[mine], slots[mine], blocks.table)
        part = take(rows, mine)
        found = []
        if tokens <= JOINED:
            settled = tokens % 2 == 1  # all is: torch's kernels let nothing start before they have ended
            found.append(linear.rope_kv(part, EPS, *given, blocks.cache, settled=settled))
        if linear.leaves_sums(part.x):
            sums, cache = linear.begin(part.x), blocks.cache if tokens > JOINED else poison.clone()
            found.append(ops.rope_kv(sums, *given, cache, num_q, eps=EPS, square_sums=part.square_sums))
            assert same_bits(blocks.at(slots[mine], positions[mine], cache), whole_kv[mine]), tokens
        if not found:
            y = linear(part.x, square_sums=part.square_sums, eps=EPS)
            found.append(ops.rope_kv(y, *given, blocks.cache, num_q))
        for q in found:
            assert same_bits(q, whole_q[mine]), tokens
        assert same_bits(blocks.at(slots[mine], positions[mine]), whole_kv[mine]), tokens
        assert blocks.cache.isfinite().sum() == tokens * 2 * num_kv * DIM, tokens


@pytest.mark.parametrize("block_size", [13, 16, 64])
@pytest.mark.parametrize("tokens", [1, 5, 16, 33, 64])
def test_rows_without_a_slot_or_a_block_write_nothing(tokens: int, block_size: int) -> None:
    num_q, num_kv, hidden = 32, 8, 2048
    linear, cos_sin = ops.Linear(matrix((num_q + 2 * num_kv) * DIM, hidden)), angles(DIM, MOST, CUDA)
    rows = ops.weigh_rows(random(tokens, hidden), near_one(hidden))
    blocks = Blocks(num_kv, block_size)
    positions = torch.arange(7, 7 + 5 * tokens, 5, device=CUDA, dtype=torch.int32)
    slots = torch.arange(tokens, device=CUDA, dtype=torch.int32) % 3 - 1
    blocks.table[:, 2::3] = -1
    here = slots >= 0
    here &= blocks.table[slots.long().clamp(min=0), positions.long() // block_size] >= 0
    q = linear.rope_kv(rows, EPS, cos_sin, positions, slots, blocks.table, blocks.cache)
    assert q[slots >= 0].isfinite().all()
    written = blocks.at(slots[here], positions[here])
    assert written.isfinite().all()
    assert blocks.cache.isfinite().sum() == written.numel()
    assert bool(here.any()) == (tokens > 1)
