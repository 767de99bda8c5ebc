"""Answers in OpenAI's shapes: whole, and in the chunks of a stream."""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any

from minivllm import __version__
from minivllm.aio import AsyncHandle
from minivllm.plain import finite, plain_logprobs
from minivllm.request import Delta, Generation, Logprob, Logprobs, SamplingParams
from minivllm.server.gate import dumps, error_body
from minivllm.tokenizer import Tokenizer

logger = logging.getLogger("minivllm")


class Answer(ABC):
    """Shape the answer to one body. Choices are numbered by prompt, then by sample.

    Parameters
    ----------
    model
        The name that the answer carries.
    params
        Of every prompt of the body.
    tokenizer
        Of the model, if it has one.
    """

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, model: str, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.params, self.tokenizer = params, tokenizer
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"minivllm-{__version__}",
        }
        self._seen: dict[int, tuple[int, int]] = {}  # choice: its tokens and characters that were sent

    @property
    def id(self) -> str:
        """The id that the body, or every chunk of the stream, carries."""
        return str(self._head["id"])

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [choice for generation in generations for choice in self.choices(generation)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage(generations)}

    def chunk(self, handle: AsyncHandle, delta: Delta) -> dict[str, Any] | None:
        """Return the chunk of a stream that a delta becomes; None where it shows nothing."""
        index = delta.index * self.params.n + delta.sample
        tokens, chars = self._seen.get(index, (0, 0))
        self._seen[index] = (tokens + len(delta.token_ids), chars + len(delta.text))
        wanted = self.params.logprobs is not None and delta.token_ids
        if not delta.text and not wanted and delta.finish_reason is None:
            return None
        found = None
        if wanted:
            logprobs = handle.logprobs(delta.index, delta.sample, tokens, tokens + len(delta.token_ids))
            found = self.logprobs(delta.token_ids, logprobs, chars)
        choice = {**self.piece(index, delta.text), "logprobs": found, "finish_reason": delta.finish_reason}
        return self.frame([choice])

    def frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk that holds these choices."""
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Return the chunks that come before any text."""
        return []

    @abstractmethod
    def choices(self, generation: Generation) -> list[dict[str, Any]]:
        """Return the choices of one prompt."""

    @abstractmethod
    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return what a chunk's choice holds beside log probabilities and its end."""

    @abstractmethod
    def logprobs(self, token_ids: list[int], found: Logprobs, offset: int) -> dict[str, Any]:
        """Return the log probabilities of tokens whose text begins at ``offset``."""

    def text_of(self, token_id: int, entry: Logprob | None = None) -> str:
        """Return a token's text, its number where there is no tokenizer."""
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return f"token_id:{token_id}" if self.tokenizer is None else self.tokenizer.token_text(token_id)


class CompletionAnswer(Answer):
    """Shape an answer of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    echo = False

    def choices(self, generation: Generation) -> list[dict[str, Any]]:
        """Return the choices of one prompt."""
        out = []
        before = self._prompt_text(generation) if self.echo else ""
        for sample in generation.samples:
            logprobs = None
            if sample.logprobs is not None:
                ids, found = list(sample.token_ids), list(sample.logprobs)
                if self.echo and generation.prompt_logprobs is not None:
                    ids, found = generation.prompt_token_ids + ids, generation.prompt_logprobs + found
                logprobs = self.logprobs(ids, found, 0)
            choice: dict[str, Any] = {
                "index": generation.index * self.params.n + sample.sample,
                "text": before + sample.text,
                "logprobs": logprobs,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            if generation.prompt_logprobs is not None:
                choice["prompt_logprobs"] = plain_logprobs(generation.prompt_logprobs)
            out.append(choice)
        return out

    def _prompt_text(self, generation: Generation) -> str:
        if generation.prompt is not None:
            return generation.prompt
        return self.tokenizer.decode(generation.prompt_token_ids) if self.tokenizer is not None else ""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return what a chunk's choice holds beside log probabilities and its end."""
        return {"index": index, "text": text}

    def logprobs(self, token_ids: list[int], found: Logprobs, offset: int) -> dict[str, Any]:
        """Return four lists, one entry a token in each."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entries in zip(token_ids, found, strict=True):
            text = self.text_of(token_id, None if entries is None else entries.get(token_id))
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            values.append(None if entries is None else finite(entries[token_id].logprob))
            if entries is None or not self.params.logprobs:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for other, entry in sorted(entries.items(), key=lambda item: item[1].rank):
                top.setdefault(self.text_of(other, entry), finite(entry.logprob))
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class ChatAnswer(Answer):
    """Shape an answer of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        body = super().whole(generations)
        if generations[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = plain_logprobs(generations[0].prompt_logprobs)
        return body

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Say who speaks."""
        start = {"role": "assistant", "content": ""}
        rest = {"logprobs": None, "finish_reason": None}
        return [self.frame([{"index": i, "delta": start, **rest}]) for i in range(num_choices)]

    def choices(self, generation: Generation) -> list[dict[str, Any]]:
        """Return the choices of the conversation."""
        out = []
        for sample in generation.samples:
            found = None
            if sample.logprobs is not None:
                found = self.logprobs(sample.token_ids, sample.logprobs, 0)
            message = {"role": "assistant", "content": sample.text, "refusal": None}
            choice = {"index": sample.sample, "message": message, "logprobs": found}
            out.append({**choice, "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason})
        return out

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return what a chunk's choice holds beside log probabilities and its end."""
        return {"index": index, "delta": {"content": text} if text else {}}

    def logprobs(self, token_ids: list[int], found: Logprobs, offset: int) -> dict[str, Any]:
        """Return one entry a token, with the likeliest others."""
        content = []
        for token_id, entries in zip(token_ids, found, strict=True):
            if entries is None:
                continue
            others = sorted(entries.items(), key=lambda item: item[1].rank)
            top = [self._entry(i, e) for i, e in others if e.rank <= (self.params.logprobs or 0)]
            content.append({**self._entry(token_id, entries[token_id]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        text = self.text_of(token_id, entry)
        exact = self.tokenizer is not None and self.tokenizer.decoder_kind == "bytes"
        own = self.tokenizer.token_bytes(token_id, False) if self.tokenizer and exact else text.encode()
        return {"token": text, "logprob": finite(entry.logprob), "bytes": list(own)}


def usage(generations: list[Generation]) -> dict[str, Any]:
    """Count the tokens of prompts and answers."""
    prompt = sum(len(g.prompt_token_ids) for g in generations)
    answer = sum(len(s.token_ids) for g in generations for s in g.samples)
    cached = sum(g.stats.cached_tokens for g in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def fault(answer_id: str, reason: str | None, error: str | None) -> tuple[int, dict[str, Any]]:
    """Return status and body for an answer that an error or the server's end cut short."""
    if reason == "cancelled":
        return 503, error_body("The server is shutting down.", "server_error", code="cancelled")
    return 500, internal_error(answer_id, error)


def internal_error(answer_id: str, error: str | None) -> dict[str, Any]:
    """Log what went wrong and return a body that leaves it out: it may tell of paths, of memory, of others' prompts."""
    logger.error("%s failed: %s", answer_id, error or "no reason was given")
    return error_body(f"Internal error; see the server's log for {answer_id}.", "server_error", code="internal_error")


async def events(handle: AsyncHandle, answer: Answer, include_usage: bool) -> AsyncIterator[bytes]:
    """Write a stream of server-sent events; when its reader leaves, the requests are cancelled."""
    extra = {"usage": None} if include_usage else {}
    try:
        for chunk in answer.opening(len(handle.requests) * answer.params.n):
            yield event({**chunk, **extra})
        async for delta in handle:
            if delta.finish_reason in ("error", "cancelled"):
                error = handle.requests[delta.index].sequences[delta.sample].error
                yield event(fault(answer.id, delta.finish_reason, error)[1])
                break
            shown = answer.chunk(handle, delta)
            if shown is not None:
                yield event({**shown, **extra})
        else:
            if include_usage:
                yield event({**answer.frame([]), "usage": usage(await handle.result())})
        yield b"data: [DONE]\n\n"
    finally:
        handle.cancel()


def event(data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + dumps(data) + b"\n\n"
