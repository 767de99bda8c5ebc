"""The operations between logits and tokens, and the slots' state that they read; `minivllm.ops` has them too."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minivllm import _C
else:
    from minivllm import _extension

    _C = _extension.load()

# Words of a slot's row of state, and the bits of its flags (SlotWord and SlotFlag of csrc/kernels_state.h).
LAST_TOKEN = _C.LAST_TOKEN
TEMPERATURE = _C.TEMPERATURE
TOP_K = _C.TOP_K
TOP_P = _C.TOP_P
MIN_P = _C.MIN_P
REPETITION_PENALTY = _C.REPETITION_PENALTY
PRESENCE_PENALTY = _C.PRESENCE_PENALTY
FREQUENCY_PENALTY = _C.FREQUENCY_PENALTY
SEED_LOW = _C.SEED_LOW
SEED_HIGH = _C.SEED_HIGH
SAMPLE = _C.SAMPLE
FLAGS = _C.FLAGS
NUM_BIAS = _C.NUM_BIAS
SLOT_WORDS = _C.SLOT_WORDS
USES_COUNTS = _C.USES_COUNTS
LEADER_SUFFICES = _C.LEADER_SUFFICES


class Leaders(NamedTuple):
    """Say where a product notes the largest of every 64 logits of a row, and whose logits they are."""

    noted: Tensor  # int64 [num_rows, vocab_size / 64], rounded up: what `empty_leaders` gives
    slots: Tensor  # as for `sample`
    state: Tensor


class StepCounters(NamedTuple):
    """Say what a draw does beside: prepare the next step of the same rows, and tell the host.

    Rows with a slot get their token as the next id; their position, and the ``positions`` that `sample` is given, one
    higher; their token also in row ``turns[row]`` of ``host_tokens``, and their turn goes on to the row after that, or
    to the first.
    """

    token_ids: Tensor  # int32 [num_rows], on the device
    positions: Tensor  # int32 [num_rows], on the device, of the tokens that the step computes
    turns: Tensor  # int32 [num_rows], on the device; of one outside of host_tokens the host is not told
    host_tokens: Tensor  # int32 [num_turns, num_rows or more], contiguous, in pinned memory of the host


_ONE_BITS: int = struct.unpack("<i", struct.pack("<f", 1.0))[0]


def update_state(state: Tensor, pairs: Tensor) -> None:
    """Write single words of the slots' state.

    Parameters
    ----------
    state
        int32, contiguous, of any shape: written to.
    pairs
        ``int32[num_pairs, 2]``: a flat index and its value. An index outside ``state`` is skipped.
    """
    _C.update_state(state, pairs)


def copy_words(to: Tensor, source: Tensor) -> None:
    """Copy int32 between a CUDA device and pinned memory of the host, in the order of the current stream.

    For few KB it is quicker than ``copy_``, which hands them to the copy engine. The host's tensor must be kept until
    the copy is over: torch does not know of it.

    Raises
    ------
    ValueError
        None of both is on CUDA, the other is not pinned, or a size or dtype does not fit.
    """
    _C.copy_words(to, source)


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: Tensor,
    counts: Tensor | None = None,
    bias: tuple[Tensor, Tensor, Tensor] | None = None,
    workspace: Tensor | None = None,
    leaders: Tensor | None = None,
    settled: bool = False,
    counters: StepCounters | None = None,
) -> Tensor:
    """Draw the next token of each row by the parameters in its slot's state.

    Parameters
    ----------
    logits
        ``float32[num_rows, vocab_size]``; rows may be apart.
    slots
        ``int32[num_rows]``; nothing happens for a row of -1.
    positions
        ``int32[num_rows]``: the position that the new token takes, which keys the random numbers.
    state
        ``int32[num_slots, words]``, ``words >= SLOT_WORDS``: ``LAST_TOKEN`` is written.
    counts
        ``int32[num_slots, vocab_size]``: bit 30 for a token of the prompt, low bits for how often it was
        generated; written for slots with ``USES_COUNTS``. May be None where no slot has it.
    bias
        ``(ids int32, values float32, until int32)``, each ``[num_slots, max_bias]``: added to a logit
        while the position is below ``until``.
    workspace
        What ``sample_workspace`` gave: written to, and left as it was found.
    leaders
        What `Linear.logits` has noted, for slots with ``LEADER_SUFFICES``, whose logits are then not read.
    settled
        Nothing still running in the stream writes ``slots`` or the flags in ``state``: see
        `minivllm.ops.decode_attention`.
    counters
        For CUDA: what is written beside.

    Returns
    -------
    Tensor
        ``int32[num_rows]``; -1 where a logit is NaN or none is finite.
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    ids, values, until = bias if bias is not None else (None, None, None)
    ids_out, step_positions, turns, host_tokens = counters if counters is not None else (None,) * 4
    _C.sample(
        tokens,
        logits,
        slots,
        positions,
        state,
        counts,
        ids,
        values,
        until,
        workspace,
        leaders,
        settled,
        ids_out,
        step_positions,
        turns,
        host_tokens,
    )
    return tokens


def empty_leaders(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Allocate ``int64[num_rows, vocab_size / 64]``, rounded up, for the leaders of so many rows of logits."""
    return torch.empty(num_rows, -(-vocab_size // _C.LEADER_COLUMNS), dtype=torch.int64, device=device)


def sample_workspace(max_rows: int, vocab_size: int, device: torch.device) -> Tensor | None:
    """Return the workspace that ``sample`` needs for up to ``max_rows`` rows; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.zeros(_C.sample_workspace_size(max_rows, vocab_size), dtype=torch.uint8, device=device)


def logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log probabilities of the raw logits.

    Parameters
    ----------
    logits
        ``float32[num_rows, vocab_size]``; rows may be apart.
    tokens
        ``int32[num_rows]``; a negative one gives NaN and rank 0.
    top_n
        How many of the likeliest tokens to list, 0 or more.

    Returns
    -------
    tuple
        ``float32[num_rows]`` and ``int32[num_rows]``: each token's log probability and rank, 1 for the
        likeliest; ``int32[num_rows, top_n]`` and ``float32[num_rows, top_n]``: the likeliest tokens in
        falling order, the lowest id first among equals, and theirs.
    """
    rows, device = logits.shape[0], logits.device
    found = torch.empty(rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    top_ids = torch.empty((rows, top_n), dtype=torch.int32, device=device)
    top_logprobs = torch.empty((rows, top_n), dtype=torch.float32, device=device)
    _C.logprobs(found, ranks, top_ids, top_logprobs, logits, tokens)
    return found, ranks, top_ids, top_logprobs


def count_tokens(counts_row: Tensor, token_ids: Tensor, num_prompt_tokens: int) -> None:
    """Start a slot's row of counts again from a sequence's tokens, the prompt's first.

    ``counts_row`` is ``int32[vocab_size]`` and written to; ``token_ids`` is ``int32[num_tokens]``.
    """
    _C.count_tokens(counts_row, token_ids, num_prompt_tokens)


def argmax(logits: Tensor) -> Tensor:
    """Return the largest logit's id in each row, ``int32[num_rows]``, the lowest among equals.

    ``logits`` is ``float32[num_rows, vocab_size]``, rows may be apart. A row where a logit is NaN or none
    is finite gives -1.
    """
    rows, device = logits.shape[0], logits.device
    state = torch.zeros((rows, SLOT_WORDS), dtype=torch.int32, device=device)
    state[:, TOP_P] = _ONE_BITS
    state[:, REPETITION_PENALTY] = _ONE_BITS
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    workspace = sample_workspace(rows, logits.shape[1], device)
    return sample(logits, slots, slots, state, workspace=workspace)
