"""The arrays of one step, and how they are laid out for the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from minivllm.sequence import Sequence

Ints = npt.NDArray[np.int32]


def _empty() -> Ints:
    return np.empty(0, np.int32)


@dataclass
class SlotSetup:
    """Say what a slot's new owner needs on the device beside its words: counts for penalties, biased ids."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    uses_counts: bool
    bias: list[tuple[int, float, int]]  # (token id, value, position at which it ends)


@dataclass
class Batch:
    """Hold what one step computes: decode rows first, then runs of prompt tokens.

    With T tokens, D <= T of them decode rows, P prefill runs and R rows that draw a token::

        tokens    | d0 d1 … dD-1 | run 0 … | run 1 … |        length T
        q_starts                 0         n0        n0+n1    length P + 1, from the first prefill token

    Every array is int32. ``token_ids`` is -1 where the slot's last token, on the device, is meant.
    """

    num_decode: int  # D
    token_ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]
    sample_rows: Ints  # [R] which of the T rows draw
    sample_slots: Ints  # [R]
    sample_lens: Ints  # [R] tokens with KV after this step = the position of the token drawn
    seq_slots: Ints = field(default_factory=_empty)  # [P]
    seq_lens: Ints = field(default_factory=_empty)  # [P] tokens with KV after this step
    q_starts: Ints = field(default_factory=_empty)  # [P + 1]
    updates: list[int] = field(default_factory=list)  # flat pairs: index into the device state, value
    setups: list[SlotSetup] = field(default_factory=list)
    num_logprobs: int = -1  # the most that a row wants; -1: none
    prompt_logprobs: list[tuple[Sequence, int, int, int]] = field(default_factory=list)  # (sequence, row, first, count)
    host_rows: list[tuple[int, Sequence]] = field(default_factory=list)  # rows whose logits a logits_fn sees
    sequences: list[Sequence] = field(default_factory=list)  # [R], as sample_rows
    runs: list[Sequence] = field(default_factory=list)  # [P]
    epochs: Ints = field(default_factory=_empty)  # [R]

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.sample_rows)

    @property
    def decode_only(self) -> bool:
        """Whether every token is a decode row that draws."""
        return self.num_decode == len(self.token_ids)

    @property
    def max_q_len(self) -> int:
        """The longest run of prompt tokens."""
        return int(np.diff(self.q_starts).max()) if len(self.seq_slots) else 0

    def pack(self, out: Ints, rows: int, turn: int) -> list[int]:
        """Lay the arrays end to end in ``out`` and return where each begins, the end last.

        Parameters
        ----------
        out : int32 array, written
        rows : int
            Room for each of the first five arrays of a decode-only step, padded with slot -1, so that a captured
            graph finds them at fixed places.
        turn : int
            What the rows of a decode-only step have as their turns: see `minivllm.ops.StepCounters`.

        Returns
        -------
        list of int
            Starts of token_ids, positions, slots, sample_lens, turns, sample_rows, sample_slots, seq_slots, seq_lens,
            q_starts, updates, and the end. A decode-only step has no arrays between turns and updates, others have
            no turns.
        """
        if self.decode_only:
            n = len(self.token_ids)
            parts = (self.token_ids, self.positions, self.slots, self.sample_lens)
            for i, part in enumerate(parts):
                out[i * rows : i * rows + n] = part
                out[i * rows + n : (i + 1) * rows] = -1 if i == 2 else 0
            out[4 * rows : 5 * rows] = turn
            starts = [0, rows, 2 * rows, 3 * rows, 4 * rows] + [5 * rows] * 6
        else:
            starts = []
            at = 0
            for part in (
                self.token_ids,
                self.positions,
                self.slots,
                self.sample_lens,
                _empty(),
                self.sample_rows,
                self.sample_slots,
                self.seq_slots,
                self.seq_lens,
                self.q_starts,
            ):
                starts.append(at)
                out[at : at + len(part)] = part
                at += len(part)
            starts.append(at)
        end = starts[-1] + len(self.updates)
        out[starts[-1] : end] = self.updates
        starts.append(end)
        return starts

    def size(self, rows: int) -> int:
        """Return how many int32 `pack` needs."""
        per_token = 5 * rows if self.decode_only else 3 * self.num_tokens + 3 * self.num_rows
        return per_token + 3 * len(self.seq_slots) + 1 + len(self.updates)
