"""Drawing tokens: against float64 distributions, against the noise written out again, and row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from minivllm import ops

VOCAB_SIZES = [1, 7, 32003, 49152, 128256]
PROMPT_BIT = 1 << 30
ALWAYS = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """What a slot's row of state says about sampling."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 7
    sample: int = 0
    uses_counts: bool = False
    num_bias: int = 0

    def words(self) -> list[int]:
        def bits(x: float) -> int:
            return int(np.float32(x).view(np.int32))

        words = [0] * ops.SLOT_WORDS
        words[ops.LAST_TOKEN] = -9
        words[ops.TEMPERATURE] = bits(self.temperature)
        words[ops.TOP_K] = self.top_k
        words[ops.TOP_P] = bits(self.top_p)
        words[ops.MIN_P] = bits(self.min_p)
        words[ops.REPETITION_PENALTY] = bits(self.repetition)
        words[ops.PRESENCE_PENALTY] = bits(self.presence)
        words[ops.FREQUENCY_PENALTY] = bits(self.frequency)
        low, high = np.array([self.seed], np.uint64).view(np.int32)
        words[ops.SEED_LOW], words[ops.SEED_HIGH] = int(low), int(high)
        words[ops.SAMPLE] = self.sample
        words[ops.FLAGS] = ops.USES_COUNTS if self.uses_counts else 0
        words[ops.NUM_BIAS] = self.num_bias
        return words


def int32(values, device: torch.device) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=device)


def make_state(rows: list[Row], device: torch.device) -> Tensor:
    """Return state with room for a block table behind each row, as an engine has it."""
    state = torch.full((len(rows), ops.SLOT_WORDS + 5), -1, dtype=torch.int32, device=device)
    state[:, : ops.SLOT_WORDS] = int32([row.words() for row in rows], device)
    return state


def draw(logits: Tensor, rows: list[Row], positions, slots=None, counts=None, bias=None) -> np.ndarray:
    """Draw a token a row of logits; row i's parameters are those of slots[i], by default of slot i."""
    device = logits.device
    slots = int32(range(len(logits)) if slots is None else slots, device)
    workspace = ops.sample_workspace(len(logits), logits.shape[1], device)
    state = make_state(rows, device)
    tokens = ops.sample(logits, slots, int32(positions, device), state, counts, bias, workspace)
    if len(rows) == len(slots):
        assert torch.equal(state[slots.long(), ops.LAST_TOKEN], tokens)
    return tokens.cpu().numpy()


def draw_many(logits: np.ndarray, row: Row, num: int, device: torch.device, **kwargs) -> np.ndarray:
    """Draw from one row of logits at positions 0 .. num - 1, all from slot 0."""
    repeated = torch.tensor(logits, device=device).repeat(num, 1)
    return draw(repeated, [row], np.arange(num), np.zeros(num), **kwargs)


def random_logits(num_rows: int, vocab_size: int, seed: int, scale: float = 2.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def probabilities(logits: np.ndarray, row: Row, counts=None, bias=None) -> np.ndarray:
    """Return the distribution in float64, with a sort: penalties, temperature, min-p, top-k, top-p."""
    logits = logits.astype(np.float64)
    for token, value in (bias or {}).items():
        logits[token] += value
    if counts is not None:
        seen, generated = counts != 0, counts & (PROMPT_BIT - 1)
        penalised = np.where(logits > 0, logits / row.repetition, logits * row.repetition)
        logits = np.where(seen, penalised, logits)
        logits = logits - row.frequency * generated - row.presence * (generated > 0)
    weights = np.exp((logits - logits.max()) / row.temperature)
    weights[weights < row.min_p] = 0
    order = np.argsort(-logits, kind="stable")
    if row.top_k:
        weights[order[row.top_k :]] = 0
    sums = np.cumsum(weights[order])
    before = sums - weights[order]
    weights[order[before >= row.top_p * sums[-1]]] = 0
    return weights / weights.sum()


def chi_square_limit(degrees: int) -> float:
    """Return what chi-square passes with probability 1e-4 (Wilson and Hilferty's approximation)."""
    third = 2 / (9 * degrees)
    return degrees * (1 - third + 3.719 * math.sqrt(third)) ** 3


def fits(draws: np.ndarray, expected: np.ndarray) -> bool:
    """Test draws against probabilities, the rare tokens put together."""
    observed = np.bincount(draws, minlength=len(expected)).astype(np.float64)
    if observed[expected == 0].sum() > 0:
        return False
    expected = expected * len(draws)
    rare = expected < 8
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return True
    return bool(((observed - expected) ** 2 / expected).sum() < chi_square_limit(len(expected) - 1))


# --- which token, exactly ---------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_takes_the_lowest_of_equals(vocab_size, device):
    logits = random_logits(9, vocab_size, seed=1).clamp(max=5.0)
    for i, row in enumerate(logits):
        row[(i * 7919 + vocab_size // 2) % vocab_size] = 6.0
        row[(i * 104729) % vocab_size] = 6.0
    logits[0] = 0.0
    logits[1] = -0.0
    logits[1, vocab_size // 2 :] = 0.0
    expected = (logits == logits.max(1, keepdim=True).values).int().argmax(1).int()
    wide = torch.full((9, vocab_size + 3), math.inf)
    wide[:, :vocab_size] = logits
    for given in (logits.to(device), wide.to(device)[:, :vocab_size]):
        assert torch.equal(ops.argmax(given).cpu(), expected)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return Philox 4x32-10 of ``uint64[4, n]`` counters."""
    c, (k0, k1), mask = list(counter), key, np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            b & mask,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            a & mask,
        ]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack(c)


def noise(vocab_size: int, row: Row, position: int) -> np.ndarray:
    quads = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    counter = np.zeros((4, len(quads)), np.uint64)
    counter[0], counter[1], counter[2] = quads, position, row.sample
    words = philox(counter, (row.seed % 2**32, row.seed >> 32)).T.reshape(-1)[:vocab_size]
    return -np.log(-np.log1p(-np.minimum((words + 0.5) / 2**32, 1 - 2.0**-24)))


def test_philox_known_answer():
    # The vectors that the generator's authors publish, here for the copy that the tests compare with.
    counter = np.array([[0x243F6A88], [0x85A308D3], [0x13198A2E], [0x03707344]], np.uint64)
    words = philox(counter, (0xA4093822, 0x299F31D0))[:, 0].tolist()
    assert words == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize(
    "row",
    [Row(), Row(temperature=0.6), Row(top_k=40), Row(top_p=0.8), Row(min_p=0.1), Row(top_k=90, top_p=0.7)],
    ids=str,
)
def test_draw_is_the_argmax_of_scores(row, device):
    """The noise of a token depends on seed, sample, position and its id, and on nothing else."""
    vocab_size, num = 1003, 60
    rows = [replace(row, seed=(i * 2**33 + 11 * i) % 2**64, sample=i % 5) for i in range(num)]
    logits = random_logits(num, vocab_size, seed=2)
    positions = np.arange(num) * 37
    tokens = draw(logits.to(device), rows, positions)
    for i in range(num):
        with np.errstate(divide="ignore"):
            scores = np.log(probabilities(logits[i].numpy(), rows[i]))
        assert tokens[i] == np.argmax(scores + noise(vocab_size, rows[i], int(positions[i])))


MIXED = [
    Row(temperature=0.0),
    Row(temperature=0.7, seed=2**63 + 5),
    Row(temperature=1.3, top_k=50),
    Row(top_p=0.9, seed=3),
    Row(min_p=0.02),
    Row(temperature=0.8, top_k=100, top_p=0.95, min_p=0.001),
    Row(temperature=0.9, repetition=1.3, presence=0.5, frequency=0.2, uses_counts=True),
    Row(temperature=0.0, num_bias=2),
    Row(temperature=30.0, top_k=20000, top_p=0.999, sample=4),
    Row(temperature=1.5, num_bias=2, top_p=0.5, repetition=1.1, uses_counts=True),
]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_same_token_alone_and_in_any_batch(vocab_size, device):
    num = len(MIXED)
    logits = random_logits(num, vocab_size, seed=3).to(device)
    positions = np.arange(num) * 3 + 1
    generator = np.random.default_rng(4)
    counts = int32(generator.choice([0, 0, 0, 2, PROMPT_BIT, PROMPT_BIT + 1], (num, vocab_size)), device)
    ids = int32(generator.integers(0, vocab_size, (num, 2)), device)
    bias = (ids, torch.full((num, 2), 3.0, device=device), int32(np.full((num, 2), ALWAYS), device))

    def take(order, num_copies=1):
        """Draw the rows in an order, from slots in that order too, each as often as said."""
        order = np.tile(order, num_copies)
        index = torch.as_tensor(order, device=device)
        tokens = draw(
            logits[index],
            [MIXED[i] for i in order],
            positions[order],
            counts=counts[index],
            bias=tuple(part[index] for part in bias),
        )
        return tokens.tolist()

    together = take(np.arange(num))
    assert all(0 <= token < vocab_size for token in together)
    assert take(np.arange(num)[::-1]) == together[::-1]
    assert [take([i])[0] for i in range(num)] == together
    copies = 20 if device.type == "cuda" or vocab_size < 1000 else 2
    assert take(np.arange(num), copies) == together * copies
    wide = torch.full((num, vocab_size + 1), math.nan, device=device)
    wide[:, :vocab_size] = logits
    logits = wide[:, :vocab_size]
    index = list(range(num))
    strided = draw(logits, MIXED, positions, index, counts.clone(), bias)
    assert strided.tolist() == together


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_cuda_draws_what_the_cpu_draws(vocab_size):
    num = 40
    rows = [replace(MIXED[i % 6], seed=i) for i in range(num)]
    logits = random_logits(num, vocab_size, seed=5)
    logits[::3] = logits[::3].bfloat16().float()  # many ties
    logits[::7] = 1.0
    expected = draw(logits, rows, np.arange(num))
    assert draw(logits.cuda(), rows, np.arange(num)).tolist() == expected.tolist()


# --- how often --------------------------------------------------------------------------------------


CASES = {
    "plain": Row(),
    "hot": Row(temperature=1.8),
    "cold": Row(temperature=0.5),
    "top_k": Row(top_k=9),
    "top_p": Row(top_p=0.75),
    "min_p": Row(min_p=0.08),
    "all_cuts": Row(temperature=1.4, top_k=20, top_p=0.85, min_p=0.01),
    "repetition": Row(repetition=1.5, uses_counts=True),
    "presence": Row(presence=0.8, uses_counts=True),
    "frequency": Row(frequency=0.4, uses_counts=True),
    "penalties_and_cuts": Row(1.2, 30, 0.9, 0.0, 1.2, 0.3, 0.1, uses_counts=True),
    "bias": Row(num_bias=3),
    "bias_and_top_k": Row(top_k=5, num_bias=3),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name, device):
    row, vocab_size, num = CASES[name], 40, 40000
    logits = random_logits(1, vocab_size, seed=6, scale=1.5)[0].numpy()
    counts = np.tile(np.array([0, 1, PROMPT_BIT, 3, PROMPT_BIT + 2], np.int32), vocab_size // 5)
    bias = {4: 2.5, 17: -3.0, int(logits.argmax()): -math.inf}
    slot_bias = (
        int32([list(bias)], device),
        torch.tensor([list(bias.values())], device=device),
        int32([[ALWAYS, num, num]], device),
    )
    repeated = torch.tensor(logits, device=device).expand(num, -1).contiguous()
    # The sampler adds what it drew to a slot's counts: each draw has a slot of its own.
    if row.uses_counts:
        draws = np.concatenate(
            [
                draw(
                    repeated[:2000],
                    [row] * 2000,
                    np.arange(start, start + 2000),
                    counts=int32(counts, device).repeat(2000, 1),
                )
                for start in range(0, num, 2000)
            ]
        )
    else:
        draws = draw(repeated, [row], np.arange(num), np.zeros(num), bias=slot_bias)
    expected = probabilities(logits, row, counts if row.uses_counts else None, bias if row.num_bias else None)
    assert fits(draws, expected)
    others = {case: probabilities(logits, other) for case, other in CASES.items() if case != name}
    wrong = [case for case, other in others.items() if np.abs(other - expected).sum() > 0.05]
    assert wrong
    assert not any(fits(draws, others[case]) for case in wrong)


def test_chi_square_sees_a_small_bias(device):
    logits = random_logits(1, 40, seed=6, scale=1.5)[0].numpy()
    draws = draw_many(logits, Row(), 40000, device)
    assert fits(draws, probabilities(logits, Row()))
    assert not fits(draws, probabilities(logits, Row(temperature=1.04)))


@pytest.mark.parametrize("varied", ["seed", "sample", "position", "high seed"])
def test_draws_are_independent(varied, device):
    """Neighbours in each part of the key: each draws from the softmax, and pairs from its square."""
    vocab_size, num = 8, 20000
    logits = random_logits(1, vocab_size, seed=7, scale=0.7)[0]
    rows, positions = [Row()], np.zeros(num)
    if varied == "position":
        positions = np.arange(num)
    elif varied == "sample":
        rows = [Row(sample=i) for i in range(num)]
    else:
        rows = [Row(seed=i << (32 if varied == "high seed" else 0)) for i in range(num)]
    slots = np.arange(num) if len(rows) == num else np.zeros(num)
    draws = draw(logits.to(device).repeat(num, 1), rows, positions, slots).astype(np.int64)
    expected = probabilities(logits.numpy(), Row())
    assert fits(draws, expected)
    assert fits(draws[::2] * vocab_size + draws[1::2], np.outer(expected, expected).reshape(-1))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draws_stay_in_the_vocabulary(vocab_size, device):
    """Rows that are flat or have one finite logit, strided with logits of +inf beyond the vocabulary."""
    on_cpu = device.type == "cpu"
    num_draws = 100_000 if vocab_size < 100 or not on_cpu else 20_000 * 32003 // vocab_size // 10
    num_rows = min(num_draws, 100_000 if vocab_size < 100 else 500)
    wide = torch.zeros((num_rows, vocab_size + 5), device=device)
    wide[:, vocab_size:] = math.inf
    hot = np.arange(1, num_rows, 2) * 7919 % vocab_size
    wide[1::2, :vocab_size] = -math.inf
    wide[torch.arange(1, num_rows, 2, device=device), torch.as_tensor(hot, device=device)] = -3.0
    row = [Row(), Row(top_p=0.9), Row(top_k=vocab_size)]
    drawn = set()
    for start in range(0, num_draws, num_rows):
        positions = np.arange(start, start + num_rows)
        tokens = draw(wide[:, :vocab_size], row, positions, (np.arange(num_rows) // 2) % 3)
        assert tokens.min() >= 0
        assert tokens.max() < vocab_size
        assert np.array_equal(tokens[1::2], hot)
        drawn.update(tokens[::2].tolist())
    assert len(drawn) > min(vocab_size * 0.9, num_draws / 4) - 1


# --- edges ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exponent", range(1, 10))
def test_small_temperatures_are_greedy(dtype, exponent, device):
    logits = random_logits(6, 32003, seed=8).to(dtype)
    logits[0] *= 5000
    logits[1, 17], logits[1, 18] = 6e4, -6e4
    logits[2] = -6e4
    logits[2, 32002] = 5.9e4
    logits[3, :9] = torch.tensor(torch.finfo(dtype).max).to(dtype) / 2
    logits[3, 9] = torch.finfo(dtype).max
    for row in logits[[0, 4, 5]]:
        row[row.argmax()] += 8  # no ties, and no rival within reach of the noise
    logits = logits.float().to(device)
    temperature = 10.0**-exponent
    rows = [
        Row(temperature),
        Row(temperature, top_p=0.9),
        Row(temperature, top_k=3),
        Row(temperature, min_p=0.1),
    ]
    for row in rows:
        tokens = draw(logits, [row] * 6, np.arange(6))
        assert tokens.tolist() == logits.argmax(1).tolist()


def test_greedy_below_the_least_temperature_breaks_ties_too(device):
    logits = torch.zeros((2, 300), device=device)
    logits[:, [50, 60]] = 1.0
    assert draw(logits, [Row(9e-6), Row(1e-9, top_k=5)], [3, 4]).tolist() == [50, 50]


@pytest.mark.parametrize("row", MIXED[:6], ids=str)
@pytest.mark.parametrize("vocab_size", [7, 32003])
def test_rows_without_a_choice(row, vocab_size, device):
    logits = random_logits(4, vocab_size, seed=9).to(device)
    rows = [replace(row, seed=i) for i in range(4)]
    expected = draw(logits, rows, np.arange(4)).tolist()
    for where in (0, vocab_size // 2, vocab_size - 1):
        bad = logits.clone()
        bad[2, where] = math.nan
        assert draw(bad, rows, np.arange(4)).tolist() == [*expected[:2], -1, expected[3]]
    bad = logits.clone()
    bad[1] = -math.inf
    bad[3, [2, 5]] = math.inf
    assert draw(bad, rows, np.arange(4)).tolist() == [expected[0], -1, expected[2], 2]


def test_forbidden_everywhere_gives_no_token(device):
    bias = (
        int32([[0, 1, 2]], device),
        torch.full((1, 3), -math.inf, device=device),
        int32([[10, 10, 10]], device),
    )
    logits = torch.tensor([[math.inf, 1.0, 0.0]], device=device)
    for row in (Row(0.0, num_bias=3), Row(num_bias=3), Row(top_k=2, num_bias=3)):
        assert draw(logits, [row], [9], bias=bias).tolist() == [-1]
        assert draw(logits, [row], [10], bias=bias).tolist() == [0]


def test_padding_rows_touch_nothing(device):
    logits = random_logits(3, 1000, seed=10).to(device)
    state = make_state([Row(uses_counts=True)] * 2, device)
    before = state.clone()
    counts = torch.zeros((2, 1000), dtype=torch.int32, device=device)
    workspace = ops.sample_workspace(3, 1000, device)
    slots = int32([-1, 1, -1], device)
    tokens = ops.sample(logits, slots, int32([5, 5, 5], device), state, counts, workspace=workspace)
    token = int(tokens[1])
    before[1, ops.LAST_TOKEN] = token
    assert torch.equal(state, before)
    assert counts.nonzero().tolist() == [[1, token]]


def test_counts_grow_with_what_is_drawn(device):
    logits = torch.zeros((1, 12), device=device)
    counts = torch.zeros((1, 12), dtype=torch.int32, device=device)
    counts[0, 3] = PROMPT_BIT
    row = Row(temperature=0.0, presence=1.0, uses_counts=True)
    drawn = [int(draw(logits, [row], [step], counts=counts)[0]) for step in range(14)]
    assert drawn == [*range(12), 0, 1]
    assert counts[0].tolist() == [2, 2, 1, PROMPT_BIT + 1, *[1] * 8]


@pytest.mark.parametrize("vocab_size", [50, 32003])
def test_top_k_keeps_exactly_k_of_ties(vocab_size, device):
    logits = np.full(vocab_size, -1.0, np.float32)
    logits[[7, 9, 20, 21, 40]] = 2.0
    logits[30] = 3.0
    draws = draw_many(logits, Row(temperature=2.0, top_k=4), 600, device)
    assert set(draws.tolist()) == {30, 7, 9, 20}
    assert set(draw_many(logits, Row(5.0, top_k=1), 100, device).tolist()) == {30}


def test_top_p_keeps_the_lowest_of_ties(device):
    flat = np.zeros(10, np.float32)
    assert set(draw_many(flat, Row(top_p=0.35), 600, device).tolist()) == {0, 1, 2, 3}
    assert set(draw_many(flat, Row(top_p=1e-9), 100, device).tolist()) == {0}


def test_top_k_tells_close_logits_apart(device):
    """Order is by the logits themselves, however little a high temperature leaves between them."""
    logits = np.zeros(5000, np.float32)
    logits[1234] = np.nextafter(np.float32(0), np.float32(1)) * 2**30
    logits[4321] = logits[1234] * 2
    draws = draw_many(logits, Row(1000.0, top_k=2), 100, device)
    assert set(draws.tolist()) == {1234, 4321}


# --- state, counts, log probabilities -----------------------------------------------------------------


def test_update_state_skips_what_is_outside(device):
    state = torch.arange(40, dtype=torch.int32, device=device).reshape(4, 10)
    expected = state.clone()
    expected[1, 3], expected[3, 9] = 70, 71
    ops.update_state(state, int32([[13, 70], [-1, 5], [39, 71], [40, 6], [2**31 - 1, 7]], device))
    assert torch.equal(state, expected)


def test_count_tokens_starts_a_row_again(device):
    row = torch.full((9,), 77, dtype=torch.int32, device=device)
    ops.count_tokens(row, int32([2, 2, 8, 2, 0, 0], device), 3)
    assert row.tolist() == [2, 0, PROMPT_BIT + 1, 0, 0, 0, 0, 0, PROMPT_BIT]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logprobs(vocab_size, device):
    logits = random_logits(5, vocab_size, seed=11)
    logits[1] = logits[1].round()
    logits[2] = 4.0
    logits[3] *= 1000
    wide = torch.full((5, vocab_size + 1), math.nan)
    wide[:, :vocab_size] = logits
    tokens = torch.tensor([vocab_size - 1, vocab_size // 2, vocab_size // 3, 0, -1], dtype=torch.int32)
    top_n = min(20, vocab_size)
    exact = torch.log_softmax(logits.double(), 1)
    order = torch.argsort(logits, 1, descending=True, stable=True)
    given = wide.to(device)[:, :vocab_size]
    found, ranks, top_ids, top_logprobs = (
        part.cpu() for part in ops.logprobs(given, tokens.to(device), top_n)
    )
    for i in range(4):
        token = int(tokens[i])
        assert abs(float(found[i]) - float(exact[i, token])) <= 2e-5 + 1e-6 * abs(float(exact[i, token]))
        assert int(ranks[i]) == order[i].tolist().index(token) + 1
    assert math.isnan(found[4])
    assert int(ranks[4]) == 0
    assert torch.equal(top_ids.long(), order[:, :top_n])
    torch.testing.assert_close(top_logprobs.double(), exact.gather(1, top_ids.long()), rtol=1e-6, atol=2e-5)
    for i in range(5):
        alone = ops.logprobs(logits[i : i + 1].to(device), tokens[i : i + 1].to(device), top_n)
        assert torch.equal(alone[0].cpu().view(torch.int32), found[i : i + 1].view(torch.int32))
        assert torch.equal(alone[3].cpu(), top_logprobs[i : i + 1])
    nothing = ops.logprobs(given, tokens.to(device), 0)
    assert torch.equal(nothing[1].cpu(), ranks)
    assert nothing[2].shape == (5, 0)
