"""How far the reader of a sample has come."""

from __future__ import annotations

from minivllm.request import Delta
from minivllm.sequence import Request, Sequence


class Cursor:
    """Remember how much of a sample its reader has seen."""

    def __init__(self, request: Request, sequence: Sequence) -> None:
        self._request, self._sequence = request, sequence
        self._num_tokens = self._num_chars = 0
        self.finished = False

    def pull(self) -> Delta | None:
        """Return what is new, if anything."""
        sequence = self._sequence
        if sequence.state != "ended" and not sequence.params.stop:
            sequence.advance_text()
        tokens = sequence.tokens[sequence.prompt_len + self._num_tokens :]
        text = sequence.text.text[self._num_chars :]
        self.finished = sequence.state == "ended"
        if not tokens and not text and not self.finished:
            return None
        self._num_tokens += len(tokens)
        self._num_chars += len(text)
        reason = sequence.finish_reason if self.finished else None
        return Delta(self._request.index, sequence.sample, text, tokens, reason)
