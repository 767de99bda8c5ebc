"""Rows to sample from, and the distribution that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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


# One row of each kind, for batches; slots whose rows use counts or a bias need both.
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
