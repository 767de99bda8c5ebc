"""From the device's log probabilities to those of a `Generation`."""

from __future__ import annotations

from minivllm.request import Logprob
from minivllm.sequence import Request, Sequence
from minivllm.ticket import PromptLogprobs, RowLogprobs


def _entry(request: Request, found: RowLogprobs, row: int, token: int, top_n: int) -> dict[int, Logprob]:
    """Return the token itself, then the ``top_n`` likeliest ones."""
    text = request.tokenizer.token_text if request.tokenizer is not None else None
    out = {token: Logprob(float(found.logprobs[row]), int(found.ranks[row]), text and text(token))}
    ids, values = found.top_ids[row, :top_n].tolist(), found.top_logprobs[row, :top_n].tolist()
    for i, (other, value) in enumerate(zip(ids, values, strict=True)):
        out.setdefault(other, Logprob(value, i + 1, text and text(other)))
    return out


def of_row(sequence: Sequence, found: RowLogprobs, row: int, token: int) -> dict[int, Logprob]:
    """Return the log probabilities of the token that a row drew."""
    return _entry(sequence.request, found, row, token, sequence.params.logprobs or 0)


def store_prompt(prompt: PromptLogprobs) -> None:
    """Store the log probabilities of a chunk of a prompt; what an earlier run stored is written again."""
    request = prompt.sequence.request
    assert request.prompt_logprobs is not None
    rows = [(found, row) for found in prompt.rows for row in range(len(found.logprobs))]
    for i, (token, (found, row)) in enumerate(zip(prompt.tokens, rows, strict=True)):
        top_n = request.params.prompt_logprobs or 0
        request.prompt_logprobs[prompt.first + i] = _entry(request, found, row, token, top_n)
