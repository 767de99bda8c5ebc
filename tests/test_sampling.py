"""Which token is drawn: the same alone and in any batch, on either device, and at every edge."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_rows import (
    ALWAYS,
    MIXED,
    PROMPT_BIT,
    VOCAB_SIZES,
    Row,
    draw,
    draw_many,
    int32,
    make_state,
    probabilities,
    random_logits,
)

from minivllm import ops


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
    row = Row(temperature=0.0, frequency=1.0, uses_counts=True)
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
