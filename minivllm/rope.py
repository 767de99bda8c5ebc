"""Rotary embedding as a model's config describes it: inverse frequencies and the cos/sin table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Positions whose angles are held in float64 at once, so that a long table needs little beside itself.
_POSITIONS_AT_ONCE = 8192


def number(value: Any, name: str, source: str) -> float:
    """Return a finite number as float, or raise a ValueError that names the field and its file."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{source}: {name} must be a number, not {value!r}")
    return float(value)


def positive(value: Any, name: str, source: str) -> float:
    """Return a finite number above zero as float, or raise a ValueError."""
    result = number(value, name, source)
    if result <= 0:
        raise ValueError(f"{source}: {name} must be above 0, not {value!r}")
    return result


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles.

    Attributes
    ----------
    theta
        Base of the frequencies.
    rope_type
        ``"default"``, ``"linear"``, ``"llama3"`` or ``"yarn"``.
    factor
        By how much the context is stretched (all types but the default).
    original_max_position
        Context length before stretching, in tokens (llama3 and yarn).
    low_freq_factor, high_freq_factor
        Bounds of the blend between stretched and unstretched frequencies (llama3).
    beta_fast, beta_slow, truncate
        Bounds of the ramp, in rotations, and whether they are rounded to whole dimensions (yarn).
    attention_factor
        What cos and sin are multiplied by (1 except for yarn).
    freq_factors
        Divisors of the inverse frequencies, ``head_dim / 2`` of them, as GGUF files hold them; None for none.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], source: str = "config.json") -> RopeConfig:
        """Read ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``, of a model's config.

        Raises
        ------
        ValueError
            On a scaling type that is not served, or a number out of range; the message names the field.
        """
        merged: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            part = config.get(key)
            if part is None:
                continue
            if not isinstance(part, Mapping):
                raise ValueError(f"{source}: {key} must be an object, not {part!r}")
            if any(isinstance(value, Mapping) for value in part.values()):
                raise ValueError(f"{source}: {key} differs by layer type, which is not served")
            merged.update(part)
        theta = merged.get("rope_theta")
        theta = config.get("rope_theta") if theta is None else theta
        theta = positive(10000.0 if theta is None else theta, "rope_theta", source)
        partial = merged.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial is not None and partial != 1:
            raise ValueError(f"{source}: partial_rotary_factor {partial!r} is not served, only 1")

        rope_type = merged.get("rope_type") or merged.get("type") or "default"
        if rope_type not in SERVED_ROPE_TYPES:
            served = ", ".join(SERVED_ROPE_TYPES)
            raise ValueError(f"{source}: rope scaling type {rope_type!r} is not served (served: {served})")
        if rope_type == "default":
            return cls(theta=theta)

        factor = merged.get("factor")
        original = config.get("original_max_position_embeddings")
        if original is None:
            original = merged.get("original_max_position_embeddings")
        if original is None:
            original = config.get("max_position_embeddings")
        if rope_type == "linear":
            return cls(theta=theta, rope_type=rope_type, factor=positive(factor, "rope factor", source))

        original = int(positive(original, "original_max_position_embeddings", source))
        if rope_type == "llama3":
            low = positive(merged.get("low_freq_factor"), "rope low_freq_factor", source)
            high = positive(merged.get("high_freq_factor"), "rope high_freq_factor", source)
            if high <= low:
                raise ValueError(f"{source}: rope high_freq_factor ({high}) must be above low_freq_factor ({low})")
            return cls(
                theta=theta,
                rope_type=rope_type,
                factor=positive(factor, "rope factor", source),
                original_max_position=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )

        if factor is None:
            limit = positive(config.get("max_position_embeddings"), "max_position_embeddings", source)
            factor = limit / original
        factor = positive(factor, "rope factor", source)
        attention_factor = merged.get("attention_factor")
        if attention_factor is None:
            mscale = number(merged.get("mscale") or 0.0, "rope mscale", source)
            mscale_all = number(merged.get("mscale_all_dim") or 0.0, "rope mscale_all_dim", source)
            attention_factor = _yarn_mscale(factor, 1.0)
            if mscale and mscale_all:
                attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
        return cls(
            theta=theta,
            rope_type=rope_type,
            factor=factor,
            original_max_position=original,
            beta_fast=positive(merged.get("beta_fast") or 32.0, "rope beta_fast", source),
            beta_slow=positive(merged.get("beta_slow") or 1.0, "rope beta_slow", source),
            truncate=bool(merged.get("truncate", True)),
            attention_factor=positive(attention_factor, "rope attention_factor", source),
        )

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """Return the angle per position of each pair of dimensions: float64 ``[head_dim / 2]``."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        base = self.theta**-exponents
        if self.rope_type == "linear":
            base = base / self.factor
        elif self.rope_type == "llama3":
            base = self._llama3(base)
        elif self.rope_type == "yarn":
            base = self._yarn(base, head_dim)
        if self.freq_factors is not None:
            if len(self.freq_factors) != head_dim // 2:
                raise ValueError(f"{len(self.freq_factors)} rope factors for head_dim {head_dim}")
            base = base / torch.tensor(self.freq_factors, dtype=torch.float64)
        return base

    def _llama3(self, base: torch.Tensor) -> torch.Tensor:
        # Long waves are stretched, short ones kept, and those between blended (Llama 3.1,
        # https://arxiv.org/abs/2407.21783).
        rotations = self.original_max_position * base / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((rotations - self.low_freq_factor) / span).clamp(0, 1)
        return kept * base + (1 - kept) * base / self.factor

    def _yarn(self, base: torch.Tensor, head_dim: int) -> torch.Tensor:
        # As _llama3, with a ramp over dimensions instead of wave lengths (https://arxiv.org/abs/2309.00071).
        def dimension(rotations: float) -> float:
            wave = self.original_max_position / (rotations * 2 * math.pi)
            return head_dim * math.log(wave) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        index = torch.arange(head_dim // 2, dtype=torch.float64)
        stretched = ((index - low) / width).clamp(0, 1)
        return stretched * base / self.factor + (1 - stretched) * base


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin_table(rope: RopeConfig, head_dim: int, max_position: int) -> torch.Tensor:
    """Compute cos and sin of every position's angles, in float64, rounded once to float32.

    Returns
    -------
    torch.Tensor
        float32 ``[max_position, head_dim]``: cosines in the first half of a row, sines in the second.
    """
    half = head_dim // 2
    inv_freq = rope.inv_freq(head_dim)
    table = torch.empty(max_position, head_dim, dtype=torch.float32)
    for start in range(0, max_position, _POSITIONS_AT_ONCE):
        stop = min(start + _POSITIONS_AT_ONCE, max_position)
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * inv_freq
        table[start:stop, :half] = angles.cos() * rope.attention_factor
        table[start:stop, half:] = angles.sin() * rope.attention_factor
    return table
