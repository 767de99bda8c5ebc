"""The largest logits of a row noted by the product itself: the token of a search through all of them, in every tile."""

from __future__ import annotations

import math

import pytest
import torch
from rows import CUDA, EPS, assert_rows_near, matrix, near_one, random, same_bits
from torch import Tensor

from minivllm import BatchEngine, SamplingParams, ops
from minivllm.random_model import model_path

pytestmark = pytest.mark.gpu

# Vocabulary and size: between them all tiles of 64 … 256 columns, alone and in pairs, ending with the vocabulary and
# inside themselves. The last is small, and comes by all instances that are for this alone.
HEADS = [(64, 576), (520, 576), (1000, 576), (8200, 576), (12296, 576), (49152, 576), (128256, 2048), (151936, 2048)]
HEADS += [(32008, 576), (32008, 128)]
TOKENS = [1, 16, 17, 64, 65, 128, 130, 256, 300]
WORDS = ops.SLOT_WORDS


@pytest.fixture(autouse=True)
def seeded(on_hopper: None) -> None:
    torch.manual_seed(0)


def state_of(suffices: Tensor) -> Tensor:
    """Make greedy slots, of whose logits the leaders suffice or not; rows of state are apart, as the engine's are."""
    state = torch.zeros(len(suffices), WORDS + 5, dtype=torch.int32, device=CUDA)
    one = torch.ones((), dtype=torch.float32).view(torch.int32).item()
    state[:, ops.TOP_P] = state[:, ops.REPETITION_PENALTY] = one
    state[:, ops.FLAGS] = torch.where(suffices, ops.LEADER_SUFFICES, 0)
    return state


def logits_of(linear: ops.Linear, x: Tensor, slots: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what was written, NaN elsewhere, and the leaders."""
    rows, vocab = len(x), linear.out_size
    out = torch.full((rows, vocab), math.nan, device=CUDA)
    leaders = ops.empty_leaders(rows + 1, vocab, CUDA).fill_(-7)
    linear.logits(x, ops.Leaders(leaders[:rows], slots, state), out)
    assert (leaders[rows] == -7).all(), "leaders outside were written"
    return out, leaders[:rows]


def drawn(logits: Tensor, leaders: Tensor, slots: Tensor, state: Tensor) -> Tensor:
    workspace = ops.sample_workspace(*logits.shape, CUDA)
    return ops.sample(logits, slots, slots, state, workspace=workspace, leaders=leaders)


@pytest.mark.parametrize(("vocab", "k"), HEADS)
@pytest.mark.parametrize(("dtype", "biased"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_leaders_are_those_of_all_logits(vocab: int, k: int, dtype: torch.dtype, biased: bool) -> None:
    def numbers(*shape: int) -> Tensor:
        """Draw small integers: so few values come out that most leaders are reached more than once."""
        return torch.randint(-1, 2, shape, device=CUDA).to(dtype)

    linear = ops.Linear(numbers(vocab, k), numbers(vocab) if biased else None)
    assert linear.finds_leaders
    for rows in TOKENS:
        x = numbers(rows, k)
        whole = linear(x, out_dtype=torch.float32)
        slots = torch.randperm(rows, device=CUDA).int()
        nobody = torch.zeros(rows, dtype=torch.bool, device=CUDA)
        written, leaders = logits_of(linear, x, slots, state_of(nobody))
        assert same_bits(written, whole), rows
        padded = torch.full((rows, -(-vocab // 64) * 64), -math.inf, device=CUDA)
        padded[:, :vocab] = whole
        groups = padded.view(rows, -1, 64)
        largest = groups.amax(dim=2)
        columns = torch.arange(groups[0].numel(), device=CUDA).view(1, -1, 64)
        first = columns.where(groups == largest[..., None], 1 << 30).amin(dim=2)
        assert torch.equal(leaders & 0xFFFFFFFF, first), rows
        bits = largest.view(torch.int32).long() & 0xFFFFFFFF
        rising = torch.where(bits >= 1 << 31, ~bits & 0xFFFFFFFF, bits | 1 << 31)
        assert torch.equal((leaders >> 32) & 0xFFFFFFFF, ~rising & 0xFFFFFFFF), rows


@pytest.mark.parametrize(("vocab", "k"), [(520, 576), (32008, 128), (49152, 576), (128256, 2048)])
def test_rows_whose_norm_is_half_done(vocab: int, k: int) -> None:
    linear, norm = ops.Linear(matrix(vocab, k)), near_one(k)
    x = random(max(TOKENS), k)
    for rows in TOKENS:
        weighed = ops.weigh_rows(x[:rows].contiguous(), norm)
        slots = torch.randperm(rows, device=CUDA).int()
        for suffices in (False, True):
            state = state_of(torch.full((rows,), suffices, device=CUDA))
            written = torch.full((rows, vocab), math.nan, device=CUDA)
            leaders = ops.empty_leaders(rows, vocab, CUDA)
            given = ops.Leaders(leaders, slots, state)
            linear.logits(weighed.x, given, written, square_sums=weighed.square_sums, eps=EPS)
            whole = linear(weighed.x, out_dtype=torch.float32, square_sums=weighed.square_sums, eps=EPS)
            if suffices:
                assert written.isnan().all()
            else:
                assert same_bits(written, whole), rows
            assert torch.equal(drawn(written, leaders, slots, state), ops.argmax(whole))
        plain = linear(ops.rms_norm(x[:rows], norm, EPS), out_dtype=torch.float32)
        truth = (ops.rms_norm(x[:rows].float(), norm.float(), EPS).double() @ linear.weight.double().t()).float()
        assert_rows_near(whole, truth, plain)


@pytest.mark.parametrize("vocab", [520, 49152])
@pytest.mark.parametrize("rows", TOKENS)
def test_logits_are_written_where_somebody_wants_them(rows: int, vocab: int) -> None:
    linear = ops.Linear(matrix(vocab, 576))
    x = random(rows, 576)
    whole = linear(x, out_dtype=torch.float32)
    slots = torch.randperm(rows, device=CUDA).int()
    everybody = torch.ones(rows, dtype=torch.bool, device=CUDA)
    written, leaders = logits_of(linear, x, slots, state_of(everybody))
    assert written.isnan().all()
    state = state_of(everybody)
    tokens = drawn(written, leaders, slots, state)
    assert torch.equal(tokens, ops.argmax(whole))
    assert torch.equal(state[slots.long(), ops.LAST_TOKEN], tokens)

    some = everybody.clone()
    some[::3] = False  # slots that want logits
    slots[1::4] = -1
    written, leaders = logits_of(linear, x, slots, state_of(some))
    wants = (slots >= 0) & ~some[slots.clamp(min=0).long()]
    assert same_bits(written[wants], whole[wants])
    tokens = drawn(written, leaders, slots, state_of(some))
    assert torch.equal(tokens[slots >= 0], ops.argmax(whole)[slots >= 0])


@pytest.mark.parametrize("vocab", [49152, 128256])
@pytest.mark.parametrize("asking", [0, 70, 130, 255])
def test_each_64_rows_are_written_or_not_by_themselves(asking: int, vocab: int) -> None:
    """Two warpgroups of one tile go different ways."""
    linear = ops.Linear(matrix(vocab, 576))
    x, slots = random(256, 576), torch.arange(256, device=CUDA, dtype=torch.int32)
    suffices = torch.ones(256, dtype=torch.bool, device=CUDA)
    suffices[asking] = False
    written, _ = logits_of(linear, x, slots, state_of(suffices))
    mine = slice(asking // 64 * 64, asking // 64 * 64 + 64)
    assert same_bits(written[mine], linear(x, out_dtype=torch.float32)[mine])
    written[mine] = math.nan
    assert written.isnan().all()


def tokens_by_leaders(weight: Tensor, x: Tensor) -> list[int]:
    """Draw without logits; a search through them finds the same."""
    linear, rows = ops.Linear(weight), len(x)
    slots = torch.arange(rows, device=CUDA, dtype=torch.int32)
    state = state_of(torch.ones(rows, dtype=torch.bool, device=CUDA))
    written, leaders = logits_of(linear, x, slots, state)
    tokens = drawn(written, leaders, slots, state)
    assert torch.equal(tokens, ops.argmax(linear(x, out_dtype=torch.float32)))
    return tokens.tolist()


def test_what_is_equal_and_what_cannot_be_drawn() -> None:
    """Rows of minus infinity, of equal largest logits far apart, of zeros; a NaN among numbers."""
    vocab, k = 1000, 64
    weight = torch.zeros(vocab, k, device=CUDA, dtype=torch.bfloat16)
    weight[:, 0] = -3e38
    weight[5, 1], weight[900, 1], weight[64, 1] = 1, 2, 2
    x = torch.zeros(3, k, device=CUDA, dtype=torch.bfloat16)
    x[0, 0], x[1, 1], x[2, 2] = 3e38, 1, 1
    assert tokens_by_leaders(weight, x) == [-1, 64, 0]
    weight[700, 3] = math.nan
    assert tokens_by_leaders(weight, x[1:]) == [-1, -1]


def test_refusals() -> None:
    linear = ops.Linear(matrix(520, 576))
    x, slots = random(3, 576), torch.arange(3, device=CUDA, dtype=torch.int32)
    state, leaders = state_of(torch.ones(3, dtype=torch.bool, device=CUDA)), ops.empty_leaders(3, 520, CUDA)
    for given, match in [
        ((x, (leaders[:, :8], slots, state)), "leaders"),
        ((x, (leaders.int(), slots, state)), "leaders"),
        ((x, (leaders[:2], slots, state)), "leaders"),
        ((x, (leaders, slots[:2], state)), "slots"),
        ((x, (leaders, slots.long(), state)), "slots"),
        ((x, (leaders, slots, state[:, : WORDS - 1])), "words"),
        ((x[:, :512], (leaders, slots, state)), "weight"),
    ]:
        with pytest.raises(ValueError, match=match):
            linear.logits(*given)
    others = [(matrix(520, 576).float(), False, "Hopper"), (matrix(520, 2048), False, "one chain")]
    for weight, gate_up, match in [*others, (matrix(1040, 576), True, "gate_up")]:
        other = ops.Linear(weight, gate_up=gate_up)
        assert not other.finds_leaders
        with pytest.raises(ValueError, match=match):
            other.logits(torch.zeros(3, other.in_size, device=CUDA, dtype=weight.dtype), (leaders, slots, state))


def test_an_engine_draws_the_same_with_logits_and_without() -> None:
    """Rows that are greedy alone, among rows that want logits, and those that ask for log probabilities."""
    torch.manual_seed(3)
    prompts = [torch.randint(0, 40000, (n,)).tolist() for n in (5, 70, 33, 1, 200, 64, 12, 9)]
    plain = SamplingParams(max_tokens=24, ignore_eos=True)
    asking = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
    drawing = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=1)
    with BatchEngine(model_path("random:smollm2-135m"), num_slots=8, max_seq_len=512) as engine:
        assert engine._runner._leaders is not None
        alone = [g.token_ids for g in engine.generate(prompts, plain)]
        asked = engine.generate(prompts, asking)
        assert [g.token_ids for g in asked] == alone
        for answer in asked:
            assert [step[token].rank for token, step in zip(answer.token_ids, answer.logprobs, strict=True)] == [1] * 24
        mixed = engine.generate(prompts, [plain, drawing, asking, plain, plain, drawing, plain, asking])
        assert [g.token_ids for i, g in enumerate(mixed) if i not in (1, 5)] == [
            ids for i, ids in enumerate(alone) if i not in (1, 5)
        ]
