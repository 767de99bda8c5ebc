"""What goes into the engine and what comes out: parameters, results, errors."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from minivllm import html
from minivllm.shown import shown

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "cancelled", "error"]
LogitsFn = Callable[[list[int], "torch.Tensor"], "torch.Tensor | None"]

MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
MAX_LOGIT_BIAS = 1024
MAX_STOPS = 1024  # every token is compared with each of them, while all other rows wait
_MAX_FLOAT = float.fromhex("0x1.fffffep127")  # of the float32 that parameters are on the device


class EngineClosedError(RuntimeError):
    """The engine was closed, and with it its memory."""


class IntegrityError(AssertionError):
    """The engine's bookkeeping breaks one of its own rules: a fault of the engine."""


class RequestError(RuntimeError):
    """A request that ended with an error; ``generation`` holds what there was of it."""

    def __init__(self, message: str, generation: Generation | None = None) -> None:
        super().__init__(message)
        self.generation = generation


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of an int
        return math.inf if value > 0 else -math.inf


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Say how tokens are drawn and when a request ends.

    The meanings are vLLM's where vLLM has the name. Unlike there, ``max_tokens`` has no small default and
    ``temperature`` is 0 (greedy).

    Parameters
    ----------
    temperature : float
        Divides the logits; 0 takes the likeliest token, ties to the lowest id.
    top_k : int
        Keep the ``top_k`` likeliest tokens; 0 (or -1) keeps all.
    top_p : float
        Keep the smallest set of tokens whose probabilities reach ``top_p``; in (0, 1].
    min_p : float
        Keep tokens at least ``min_p`` times as likely as the likeliest; in [0, 1].
    max_tokens : int or None
        At most this many new tokens; None runs to an end token or the length limit.
    min_tokens : int
        No end of any kind (end token, stop id, stop string) before this many new tokens.
    n : int
        Independent samples of one prompt, their prompt blocks shared.
    seed : int or None
        Any 64-bit integer. None draws one from the engine's seed; ``Generation.seed`` tells which.
    stop : str or sequence of str
        Texts that end the request; the text returned ends before them. At most 1,024 of them.
    stop_token_ids : sequence of int
        Further ids that end the request.
    ignore_eos : bool
        Go on past the model's end tokens (``stop`` and ``stop_token_ids`` still hold).
    include_stop_str_in_output : bool
        Keep the stop text, or the stop token's text, at the end of the text.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    logprobs, prompt_logprobs : int or None
        Log probabilities of each (prompt) token and of this many likeliest ones beside it; at most 20.
    repetition_penalty : float
        Above 1 makes tokens of the prompt and the answer less likely; > 0.
    presence_penalty, frequency_penalty : float
        Subtracted once, or once an occurrence, for tokens of the answer; in [-2, 2].
    logit_bias : mapping of int to float, or None
        Added to the logits of these token ids; at most 1,024 of them.
    logits_fn : callable or None
        ``logits_fn(token_ids, logits)`` with all tokens so far and a float32 tensor ``[vocab_size]`` that it may
        change in place or replace by returning another. Called on the host before every draw of this request.

    Raises
    ------
    TypeError
        A value of the wrong type, or an unknown name.
    ValueError
        A value out of range, NaN included.

    Examples
    --------
    >>> SamplingParams(temperature=0.7, top_p=0.9, seed=7).seed
    7
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    ValueError: top_p must be in (0, 1], not 1.5
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logits_fn: LogitsFn | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_int("max_tokens", 1, None, optional=True)
        self._check_int("min_tokens", 0, None)
        self._check_int("n", 1, MAX_SAMPLES)
        self._check_int("seed", -(2**63), 2**64 - 1, optional=True)
        self._check_int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._check_int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({shown(self.min_tokens)}) must not exceed max_tokens ({self.max_tokens})")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, not {shown(getattr(self, name))}")
        self._check_stops()
        if self.logits_fn is not None and not callable(self.logits_fn):
            raise TypeError(f"logits_fn must be callable, not {shown(self.logits_fn)}")

    def _check_numbers(self) -> None:
        ranges: dict[str, tuple[str, Callable[[float], bool]]] = {
            "temperature": ("a finite float32 >= 0", lambda x: 0 <= x <= _MAX_FLOAT),
            "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
            "min_p": ("in [0, 1]", lambda x: 0 <= x <= 1),
            "repetition_penalty": ("a finite float32 > 0", lambda x: 0 < x <= _MAX_FLOAT),
            "presence_penalty": ("in [-2, 2]", lambda x: -2 <= x <= 2),
            "frequency_penalty": ("in [-2, 2]", lambda x: -2 <= x <= 2),
        }
        for name, (rule, holds) in ranges.items():
            value = getattr(self, name)
            if not _is_number(value):
                raise TypeError(f"{name} must be a number, not {shown(value)}")
            if not holds(_as_float(value)):  # NaN holds nowhere
                raise ValueError(f"{name} must be {rule}, not {shown(value)}")
            object.__setattr__(self, name, float(value))
        if _is_int(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_int("top_k", 0, 2**31 - 1)

    def _check_int(self, name: str, low: int, high: int | None, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_int(value):
            raise TypeError(f"{name} must be an int{' or None' if optional else ''}, not {shown(value)}")
        if value < low or (high is not None and value > high):
            bound = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise ValueError(f"{name} must be {bound}, not {shown(value)}")
        object.__setattr__(self, name, int(value))

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) for s in stop):
            raise TypeError(f"stop must be a str or a sequence of str, not {shown(self.stop)}")
        if len(stop) > MAX_STOPS:
            raise ValueError(f"stop holds {len(stop)} texts; at most {MAX_STOPS:,} are served")
        if any(not s for s in stop):
            raise ValueError("stop must not hold an empty string: it would end every request at once")
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids
        if not isinstance(ids, (tuple, list, set, frozenset)) or not all(_is_int(i) for i in ids):
            raise TypeError(f"stop_token_ids must be a sequence of ints, not {shown(ids)}")
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must map token ids to numbers, not {shown(self.logit_bias)}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias holds {len(self.logit_bias)} ids; at most {MAX_LOGIT_BIAS} are served")
        for key, value in self.logit_bias.items():
            if not _is_int(key) or not _is_number(value):
                raise TypeError(f"logit_bias must map token ids to numbers, not {shown(key)} to {shown(value)}")
            if not _as_float(value) <= _MAX_FLOAT:  # NaN included
                raise ValueError(f"logit_bias[{shown(key)}] must be a float32 below infinity, not {shown(value)}")
        object.__setattr__(self, "logit_bias", {int(k): _as_float(v) for k, v in self.logit_bias.items()})

    @property
    def uses_counts(self) -> bool:
        """Whether a penalty needs the tokens counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, ``logits_fn`` excepted, as plain data."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "logits_fn" and value != f.default:
                out[f.name] = list(value) if isinstance(value, tuple) else value
        if "logit_bias" in out:
            out["logit_bias"] = {str(k): v for k, v in out["logit_bias"].items()}
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Build parameters from what `to_dict` gave, or from JSON with the same names."""
        values = dict(data)
        if isinstance(bias := values.get("logit_bias"), Mapping):  # JSON has no keys but texts
            try:
                values["logit_bias"] = {int(k) if isinstance(k, str) else k: v for k, v in bias.items()}
            except ValueError:
                raise ValueError(f"logit_bias must map token ids to numbers, not {shown(bias)}") from None
        return cls(**values)


@dataclass(frozen=True)
class Logprob:
    """Hold the log probability of one token at one position.

    ``rank`` counts from 1, the likeliest; ``decoded_token`` is the token's own text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = list["dict[int, Logprob] | None"]


@dataclass(frozen=True)
class Delta:
    """Carry what is new of one sample: pieces of ``text`` join to the final text.

    ``index`` is the prompt's place in the call, ``sample`` the sample's in the prompt's ``n``.
    ``finish_reason`` is None until the sample's last delta.

    Examples
    --------
    >>> [d.finish_reason for d in engine.stream("a", SamplingParams(max_tokens=3, ignore_eos=True))][-1]
    'length'
    """

    index: int
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class GenerationStats:
    """Count one request: times in seconds, lengths in tokens.

    ``ttft`` runs from the submission to the first token; ``decode_tokens_per_s`` counts the tokens after it.
    """

    queue_time: float = 0.0
    ttft: float = 0.0
    total_time: float = 0.0
    decode_tokens_per_s: float = 0.0
    cached_tokens: int = 0
    max_blocks: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Sample:
    """Hold one of a request's ``n`` answers."""

    sample: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    error: str | None = None


@dataclass(frozen=True)
class Generation:
    """Hold the answer to one prompt.

    ``text``, ``token_ids``, ``finish_reason``, ``stop_reason`` and ``logprobs`` are those of sample 0; ``samples``
    holds all ``n``. ``token_ids`` includes the end token that stopped it; ``stop_reason`` is the stop text or stop
    id, None for the model's own end token.

    Examples
    --------
    >>> [g] = engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    >>> g.index, g.prompt_token_ids, len(g.token_ids), g.finish_reason, g.error
    (0, [1, 2, 3], 4, 'length', None)
    """

    index: int
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    seed: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    prompt: str | None = None
    request_id: int = -1

    def __str__(self) -> str:
        return html.generation_text(self)

    def _repr_html_(self) -> str:
        return html.generation_html(self)
