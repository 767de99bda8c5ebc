"""Keywords that a call does not take, and where they belong."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from minivllm.request import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")


def place_of(name: str) -> str | None:
    """Say how a sampling parameter is passed; None where the name is of none."""
    field = "max_tokens" if name in ("max_new_tokens", "max_completion_tokens") else name
    return f"pass params=SamplingParams({field}=...)" if field in SamplingParams.__dataclass_fields__ else None


def explained(call: Callable[P, R]) -> Callable[P, R]:
    """Let a call refuse keywords that it does not take by a sentence: as a rule they are sampling parameters."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known.keys():
            if place := place_of(name):
                raise TypeError(f"{call.__name__} takes no {name}: {place}")
            raise TypeError(f"{call.__name__} takes no {name}, only {', '.join(list(known)[1:])}")
        return call(*args, **kwargs)

    return checked
