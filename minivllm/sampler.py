"""A request's sampling parameters as the words of its slot's row on the device."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from minivllm import ops
from minivllm.request import MAX_LOGIT_BIAS

if TYPE_CHECKING:
    from minivllm.sequence import Request

NUM_SLOT_WORDS: int = ops.SLOT_WORDS
MAX_BIAS = MAX_LOGIT_BIAS + 64  # entries a slot: logit_bias, and the end ids that min_tokens holds back
_MASK = (1 << 64) - 1


@lru_cache(256)
def _float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def derive_seed(seed: int, ordinal: int) -> int:
    """Return the seed of the engine's ``ordinal``-th request: a 63-bit mix of both (SplitMix64).

    https://doi.org/10.1145/2714064.2660195
    """
    z = ((seed & _MASK) + (ordinal + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def slot_words(request: Request, sample: int) -> list[int]:
    """Return the ``NUM_SLOT_WORDS`` int32 of a slot whose owner is this sample of the request."""
    params = request.params
    words = [0] * NUM_SLOT_WORDS
    words[ops.LAST_TOKEN] = -1
    words[ops.TEMPERATURE] = _float_bits(params.temperature)
    words[ops.TOP_K] = params.top_k
    words[ops.TOP_P] = _float_bits(params.top_p)
    words[ops.MIN_P] = _float_bits(params.min_p)
    words[ops.REPETITION_PENALTY] = _float_bits(params.repetition_penalty)
    words[ops.PRESENCE_PENALTY] = _float_bits(params.presence_penalty)
    words[ops.FREQUENCY_PENALTY] = _float_bits(params.frequency_penalty)
    words[ops.SEED_LOW] = _signed(request.seed & 0xFFFFFFFF)
    words[ops.SEED_HIGH] = _signed((request.seed >> 32) & 0xFFFFFFFF)
    words[ops.SAMPLE] = sample
    bias = request.bias()
    words[ops.NUM_BIAS] = len(bias)
    if params.uses_counts:
        words[ops.FLAGS] = ops.USES_COUNTS
    elif params.temperature == 0 and params.logprobs is None and params.logits_fn is None and not bias:
        words[ops.FLAGS] = ops.LEADER_SUFFICES
    return words
