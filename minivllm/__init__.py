"""A small engine for Llama-family models whose state you can look at.

>>> from minivllm import BatchEngine, SamplingParams
>>> with BatchEngine("path/or/hub-id", num_slots=64) as engine:
...     for answer in engine.generate(["The capital of France is"], SamplingParams(max_tokens=64)):
...         print(answer.text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.aio import AsyncEngine
    from minivllm.engine import BatchEngine
    from minivllm.handle import Handle
    from minivllm.request import Delta, Generation, SamplingParams

__version__ = "0.1.0"

__all__ = ["AsyncEngine", "BatchEngine", "Delta", "Generation", "Handle", "SamplingParams", "__version__"]

# Imported at first use, so that `import minivllm` costs nothing and the command line answers --help at once.
_HOMES = {
    "AsyncEngine": "minivllm.aio",
    "BatchEngine": "minivllm.engine",
    "Delta": "minivllm.request",
    "Generation": "minivllm.request",
    "Handle": "minivllm.handle",
    "SamplingParams": "minivllm.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
