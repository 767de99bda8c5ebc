"""Products that leave the last additions to the next kernel: the same bits as those that add themselves."""

from __future__ import annotations

import pytest
import torch

from minivllm import linear as linear_module
from minivllm import ops

pytestmark = pytest.mark.gpu

SHAPES = [(3072, 2048), (2048, 2048), (2048, 8192), (1024, 4096)]
TOKENS = [1, 2, 7, 8, 9, 16, 17, 33, 63, 64, 65, 127, 128, 129, 200, 256]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def always_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model stops to leave sums is a matter of speed; here they are left for all numbers of rows."""
    monkeypatch.setattr(linear_module, "_MOST_ROWS_IN_PARTS", max(TOKENS))


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).to(dtype)


def in_order(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_same_bits_for_any_number_of_tokens(n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n + k)
    weight = random(n, k, scale=0.02, dtype=dtype)
    linear = ops.Linear(weight)
    x = random(2048, k, dtype=dtype)
    whole = linear(x)
    assert whole.shape == (2048, n)
    truth = x.float() @ weight.float().T
    theirs = (torch.nn.functional.linear(x, weight).float() - truth).norm()
    assert (whole.float() - truth).norm() <= 2 * theirs
    rows = torch.randperm(2048, device=CUDA)
    for tokens in [*TOKENS, 257, 300, 512, 1000]:
        mine = rows[:tokens]
        assert torch.equal(linear(x[mine]), whole[mine]), tokens
        begun = linear.begin(x[mine])
        if begun.dim() == 3:
            assert begun.shape == (linear.num_chunks, tokens, n)
            assert torch.equal(in_order(begun, dtype), whole[mine]), tokens
        else:
            assert torch.equal(begun, whole[mine]), tokens
    if linear.num_chunks > 1:  # the check can fail: another number of chunks has other bits
        assert not torch.equal(linear.begin(x[:64]).sum(0), x[:64].float() @ weight.float().T)


@pytest.mark.parametrize("tokens", TOKENS)
def test_norm_adds_them_to_the_residual(tokens: int) -> None:
    torch.manual_seed(tokens)
    linear = ops.Linear(random(2048, 8192, scale=0.02))
    x, before, weight = random(tokens, 8192), random(tokens, 2048), random(2048)
    added, later = before.clone(), before.clone()
    linear(x, residual=added)
    expected = ops.rms_norm(added, weight, 1e-5)
    pending = linear.add_to(later, x)
    assert pending is not None
    assert torch.equal(later, before)
    found = ops.rms_norm(later, weight, 1e-5, partials=pending)
    assert torch.equal(found, expected)
    assert torch.equal(later, added)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_adds_them(tokens: int, normed: bool) -> None:
    torch.manual_seed(tokens)
    linear = ops.Linear(random(3072, 2048, scale=0.02))
    x = random(tokens, 2048)
    table = torch.randperm(8, device=CUDA, dtype=torch.int32).view(1, 8)
    norms = (random(64), random(64)) if normed else (None, None)
    positions = torch.arange(tokens, device=CUDA, dtype=torch.int32)
    slots = torch.zeros(tokens, device=CUDA, dtype=torch.int32)
    angles = torch.randn(512, 64, device=CUDA)
    results = []
    for qkv in (linear(x), linear.begin(x)):
        cache = torch.zeros(8, 2, 8, 64, 64, device=CUDA, dtype=torch.bfloat16)
        q = ops.rope_kv(qkv, angles, positions, slots, table, cache, 32, *norms, 1e-6)
        results.append((q, cache))
    assert linear.begin(x).dim() == 3
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("parts", [3, 4, 5, 9])
def test_any_number_of_parts_comes_to_their_sum_in_order(parts: int) -> None:
    """Four at a time are read before they are added: none, one, two rounds of them, and what is left."""
    torch.manual_seed(parts)
    tokens = 37
    table = torch.randperm(8, device=CUDA, dtype=torch.int32).view(1, 8)
    positions = torch.arange(tokens, device=CUDA, dtype=torch.int32)
    slots = torch.zeros(tokens, device=CUDA, dtype=torch.int32)
    angles, norm = torch.randn(512, 64, device=CUDA), random(2048)
    square_sums = torch.rand(tokens, 32, device=CUDA)
    before = random(tokens, 2048)

    def everything(qkv: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for more in ({}, {"eps": 1e-5, "square_sums": square_sums}):
            cache = torch.zeros(8, 2, 8, 64, 64, device=CUDA, dtype=torch.bfloat16)
            found += [ops.rope_kv(qkv, angles, positions, slots, table, cache, 32, **more), cache]
        residuals = before.clone(), before.clone()
        found.append(ops.rms_norm(residuals[0], norm, 1e-5, partials=x))
        return [*found, *ops.weigh_rows(residuals[1], norm, x), *residuals]

    qkv, x = torch.randn(parts, tokens, 3072, device=CUDA), torch.randn(parts, tokens, 2048, device=CUDA)
    whole = [in_order(sums, torch.float32)[None] for sums in (qkv, x)]
    for found, expected in zip(everything(qkv, x), everything(*whole), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(in_order(qkv.flip(0), torch.float32), whole[0][0])  # their order counts


def test_a_bias_is_added_by_the_product() -> None:
    linear = ops.Linear(random(2048, 2048, scale=0.02), random(2048))
    assert linear.num_chunks == 1
    assert linear.begin(random(5, 2048)).shape == (5, 2048)
