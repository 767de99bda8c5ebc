"""How often tokens are drawn, against distributions in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_rows import ALWAYS, PROMPT_BIT, VOCAB_SIZES, Row, draw, draw_many, int32, probabilities, random_logits


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
    num_draws = 100_000 if vocab_size < 100 or not on_cpu else 1_000 * 32003 // vocab_size
    num_rows = min(num_draws, 100_000 if vocab_size < 100 else 250)
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
    assert len(drawn) > min(vocab_size * 0.9, num_draws / 5) - 1
