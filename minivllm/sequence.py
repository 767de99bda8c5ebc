"""A request inside the engine: its samples, their tokens, their text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.batch import Ints
from minivllm.block_pool import ROOT
from minivllm.detokenizer import Detokenizer, StopChecker
from minivllm.request import (
    FinishReason,
    Generation,
    GenerationStats,
    Logprobs,
    Sample,
    SamplingParams,
)

if TYPE_CHECKING:
    from minivllm.tokenizer import Tokenizer

_NEVER = 2**31 - 1


class TextState:
    """Turn a sample's tokens into text as they come; hold back half characters and what may be a stop text."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens) if tokenizer else None
        )
        stops = params.stop if isinstance(params.stop, tuple) else (params.stop,)
        self._checker = StopChecker(stops, params.include_stop_str_in_output) if stops else None
        self.text = ""
        self.num_tokens = 0

    def push(self, token_ids: list[int], check: bool = True) -> str | None:
        """Take further tokens; return the stop text that they complete, if any."""
        self.num_tokens += len(token_ids)
        if self._detokenizer is None:
            return None
        piece = self._detokenizer.push(token_ids)
        if self._checker is None or not check:
            self.text += piece
            return None
        emitted, stop = self._checker.push(piece)
        self.text += emitted
        return stop

    def finish(self) -> str | None:
        """Release what was held back at the end of the tokens; return a stop text that it completes."""
        if self._detokenizer is None:
            return None
        tail = self._detokenizer.flush()
        if self._checker is None:
            self.text += tail
            return None
        emitted, stop = self._checker.push(tail)
        self.text += emitted
        if stop is None:
            self.text += self._checker.flush()
        return stop


@dataclass(eq=False)
class Sequence:
    """Be one sample of a request: the thing that waits in the queue, sits in a slot, ends."""

    request: Request
    sample: int
    tokens: list[int]  # the prompt, then what was drawn
    parent: Sequence | None = None  # whose full blocks it may share at its start
    logprobs: Logprobs | None = None
    # What follows is no argument: defaults of the class, so that making one of many costs little.
    state: str = field(default="queued", init=False)  # "queued" | "running" | "ended"
    slot: int = field(default=-1, init=False)
    scheduled: int = field(default=0, init=False)  # tokens whose KV is written, or is by a launched step
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    exception: BaseException | None = field(default=None, init=False)
    saved_kv: Any = field(default=None, init=False)  # to restore at admission, [layers, 2, kv heads, tokens, head_dim]
    cached_tokens: int = field(default=0, init=False)  # its stay in the slot began with
    cached_at_first: int = field(default=0, init=False)  # its first stay
    num_counted: int = field(default=0, init=False)  # prompt tokens that the engine's counters have
    max_blocks: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    admitted_at: float = field(default=0.0, init=False)
    first_token_at: float = field(default=0.0, init=False)
    ended_at: float = field(default=0.0, init=False)
    _text: TextState | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.nodes: list[int] = []  # prefix-index node of each registered block of the row
        self.prompt_len = request.prompt_len
        self.num_inherited = self.num_output  # drawn elsewhere: by what it is a fork of, or before it was saved
        self.order = (request.ordinal, self.sample)
        if request.params.logprobs is not None and self.logprobs is None:
            self.logprobs = []

    @property
    def text(self) -> TextState:
        """What its tokens say; made when first asked for, which no launch waits for."""
        if self._text is None:
            self._text = TextState(self.request.tokenizer, self.params)
        return self._text

    @property
    def params(self) -> SamplingParams:
        """The request's."""
        return self.request.params

    @property
    def output(self) -> list[int]:
        """Tokens drawn so far."""
        return self.tokens[self.prompt_len :]

    def ids(self, first: int, end: int) -> Ints:
        """Return tokens ``first`` to ``end`` as the device takes them."""
        if end <= self.prompt_len:
            return self.request.prompt_ids[first:end]
        return np.array(self.tokens[first:end], np.int32)

    def count_prompt(self, end: int) -> int:
        """Count the prompt's tokens before ``end``, each only once; return how many are new."""
        before, self.num_counted = self.num_counted, max(self.num_counted, min(end, self.prompt_len))
        return self.num_counted - before

    @property
    def num_output(self) -> int:
        """How many tokens were drawn so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def last_node(self) -> int:
        """Node of the last registered block."""
        return self.nodes[-1] if self.nodes else ROOT

    @property
    def special(self) -> bool:
        """Whether its tokens must be looked at one by one as they come."""
        params = self.params
        return bool(params.stop) or params.logprobs is not None or len(self.request.end_ids) > 8

    def reset_progress(self) -> None:
        """Forget what the device holds of it: it will be computed anew from its tokens."""
        self.slot = -1
        self.scheduled = 0
        self.nodes.clear()
        self.state = "queued"

    def rebuild_text(self) -> str | None:
        """Bring tokens, log probabilities and text in step again, as after an interrupt half-way.

        Return the stop text that the tokens complete, if any.
        """
        if self.logprobs is not None:
            del self.tokens[self.prompt_len + len(self.logprobs) :]
            del self.logprobs[self.num_output :]
        self._text = None
        return self.advance_text()

    def advance_text(self) -> str | None:
        """Take the tokens that the text has not seen; return the stop text that they complete, if any."""
        text = self.text
        start = self.prompt_len + text.num_tokens
        hidden = self._hidden_end()
        if not self.params.stop:  # nothing to look for: all at once
            text.push(self.tokens[start : len(self.tokens) if hidden < 0 else hidden], check=False)
            text.num_tokens = len(self.tokens) - self.prompt_len
            return None
        free = self.prompt_len + self.params.min_tokens  # stop texts count from here
        if start < free:
            text.push(self.tokens[start : min(free, len(self.tokens))], check=False)
            start = self.prompt_len + text.num_tokens
        for i in range(start, len(self.tokens)):
            if i == hidden:
                text.num_tokens += 1
                continue
            stop = text.push(self.tokens[i : i + 1])
            if stop is not None:
                return stop
        return None

    def _hidden_end(self) -> int:
        """Return the place of the end token whose text is not shown; -1 where there is none."""
        if self.finish_reason != "stop" or isinstance(self.stop_reason, str):
            return -1
        return -1 if self.params.include_stop_str_in_output else len(self.tokens) - 1

    def end_of_tokens(self) -> tuple[FinishReason, int | None] | None:
        """Return why the tokens as they stand are at an end, or None while they may go on."""
        request = self.request
        if self.num_output > 0:
            last = self.tokens[-1]
            if last in request.end_ids and self.num_output > self.params.min_tokens:
                return "stop", (last if last in self.params.stop_token_ids else None)
        if len(self.tokens) >= request.limit:
            return "length", None
        return None

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Close it: no token is added after this."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if not isinstance(stop_reason, str):
            stop = self.advance_text()
            if stop is None:
                stop = self.text.finish()
            if stop is not None and reason != "stop":
                self.finish_reason, self.stop_reason = "stop", stop
        self.ended_at = time.perf_counter()
        self.state = "ended"

    def to_sample(self) -> Sample:
        """Return the public view of an ended one."""
        assert self.finish_reason is not None
        return Sample(
            sample=self.sample,
            text=self.text.text,
            token_ids=self.output,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            error=self.error,
        )


@dataclass(eq=False)
class Request:
    """Be one prompt with its parameters, and the samples drawn for it."""

    ordinal: int
    index: int
    prompt: str | None
    prompt_ids: Ints  # the prompt's tokens, as the device takes them
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    limit: int  # the length, prompt included, at which a sample ends
    tokenizer: Tokenizer | None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    root: Request | None = None  # whose fork it is
    created_at: float = field(default_factory=time.perf_counter)
    num_samples: int = 0  # sample numbers given out

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_ids)

    def start(self, prompt: list[int]) -> None:
        """Make its samples; the first one's tokens are this very list."""
        first, n = Sequence(self, 0, prompt), self.params.n
        self.sequences = [first, *(Sequence(self, i, list(prompt), first) for i in range(1, n))] if n > 1 else [first]
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.prompt_len
        self.num_samples = n

    def next_sample(self) -> int:
        """Return a sample number that no branch of this request has."""
        self.num_samples = max(self.num_samples, self.params.n) + 1
        return self.num_samples - 1

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        return all(s.state == "ended" for s in self.sequences)

    def bias(self) -> list[tuple[int, float, int]]:
        """Return (token id, value, position until which it holds) for logit_bias and min_tokens."""
        params = self.params
        entries = [(i, v, _NEVER) for i, v in params.logit_bias.items()] if params.logit_bias else []
        if params.min_tokens > 0:
            until = min(self.prompt_len + params.min_tokens, _NEVER)  # an int32
            entries += [(i, float("-inf"), until) for i in sorted(self.end_ids)]
        return entries

    def to_generation(self) -> Generation:
        """Return the public result of an ended request."""
        samples = [s.to_sample() for s in self.sequences]
        first, best = samples[0], self.sequences[0]
        decode_time = best.ended_at - best.first_token_at
        started, drawn = best.first_token_at > 0, best.num_output - best.num_inherited
        stats = GenerationStats(
            queue_time=max(best.admitted_at - self.created_at, 0.0),
            ttft=best.first_token_at - self.created_at if started else 0.0,
            total_time=best.ended_at - self.created_at,
            decode_tokens_per_s=max(drawn - 1, 0) / decode_time if started and decode_time > 0 else 0.0,
            cached_tokens=best.cached_at_first,
            max_blocks=max(s.max_blocks for s in self.sequences),
            preemptions=sum(s.preemptions for s in self.sequences),
        )
        return Generation(
            index=self.index,
            prompt=self.prompt,
            prompt_token_ids=best.tokens[: self.prompt_len],
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop_reason=first.stop_reason,
            seed=self.seed,
            logprobs=first.logprobs,
            # A copy: while a fork goes on with the prompt, more of them come.
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            samples=samples,
            error=next((s.error for s in samples if s.error is not None), None),
            stats=stats,
            request_id=self.ordinal,
        )
