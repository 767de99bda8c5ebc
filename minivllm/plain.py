"""Results as plain data, for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from minivllm.request import Generation, Logprobs

_LEAST = -9999.0  # JSON has neither minus infinity nor NaN


def finite(value: float) -> float:
    """Return a log probability that JSON can hold."""
    return value if value > _LEAST else _LEAST


def plain_logprobs(found: Logprobs | None) -> list[dict[str, Any] | None] | None:
    """Return log probabilities by token id, a dict a token."""
    if found is None:
        return None
    return [
        None
        if entries is None
        else {
            str(i): {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for i, e in entries.items()
        }
        for entries in found
    ]


def plain_generation(generation: Generation) -> dict[str, Any]:
    """Return an answer; what was not asked for is left out."""
    g = generation
    out: dict[str, Any] = {
        "prompt_tokens": len(g.prompt_token_ids),
        "text": g.text,
        "token_ids": g.token_ids,
        "finish_reason": g.finish_reason,
        "stop_reason": g.stop_reason,
        "seed": g.seed,
        "error": g.error,
        "stats": {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(g.stats).items()},
    }
    if g.logprobs is not None:
        out["logprobs"] = plain_logprobs(g.logprobs)
    if g.prompt_logprobs is not None:
        out["prompt_logprobs"] = plain_logprobs(g.prompt_logprobs)
    if len(g.samples) > 1:
        out["samples"] = [
            {
                "sample": s.sample,
                "text": s.text,
                "token_ids": s.token_ids,
                "finish_reason": s.finish_reason,
                "stop_reason": s.stop_reason,
                "logprobs": plain_logprobs(s.logprobs),
            }
            for s in g.samples
        ]
    return out
