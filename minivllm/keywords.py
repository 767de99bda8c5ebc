"""Calls that say where a keyword belongs which they do not take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from minivllm.request import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")


def explained(call: Callable[P, R]) -> Callable[P, R]:
    """Let a call refuse keywords that it does not take by a sentence: as a rule they are sampling parameters."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known.keys():
            field = "max_tokens" if name in ("max_new_tokens", "max_completion_tokens") else name
            if field in SamplingParams.__dataclass_fields__:
                raise TypeError(f"{call.__name__} takes no {name}: pass params=SamplingParams({field}=...)")
            raise TypeError(f"{call.__name__} takes no {name}, only {', '.join(list(known)[1:])}")
        return call(*args, **kwargs)

    return checked
