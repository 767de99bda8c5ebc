"""Text out of a growing list of token ids, and the stop strings that end it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from minivllm.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class _Stream(Protocol):
    def push(self, ids: Iterable[int]) -> str: ...
    def flush(self) -> str: ...


class Detokenizer:
    """Decodes token by token; the pieces join to exactly what `Tokenizer.decode` gives for all ids.

    A piece never ends within a character and is never taken back. Each token costs the same however many
    came before it.

    Parameters
    ----------
    tokenizer
        Of the model that writes the ids.
    skip_special_tokens
        Whether special tokens leave no text.

    Examples
    --------
    >>> import tokenizers
    >>> from minivllm.tokenizer import Tokenizer
    >>> backend = tokenizers.Tokenizer(tokenizers.models.BPE({"Ã": 0, "©": 1}, []))
    >>> backend.decoder = tokenizers.decoders.ByteLevel()
    >>> detokenizer = Detokenizer(Tokenizer(backend))
    >>> detokenizer.push([0]), detokenizer.push([1]), detokenizer.flush()
    ('', 'é', '')
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._stream: _Stream
        if tokenizer.decoder_kind == "bytes":
            self._stream = _ByteStream(tokenizer, skip_special_tokens)
        elif tokenizer.decoder_kind == "byte_fallback":
            self._stream = _FallbackStream(tokenizer, skip_special_tokens)
        else:
            self._stream = _WindowStream(tokenizer, skip_special_tokens)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that has become final."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """Return what was held back; nothing may be pushed afterwards."""
        return self._stream.flush()


class _ByteStream:
    """Byte-level BPE: every token is a string of bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        token_bytes, skip = self._tokenizer.token_bytes, self._skip
        return self._decoder.decode(b"".join([token_bytes(token_id, skip) for token_id in ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FallbackStream:
    """SentencePiece with byte tokens: a run of those is text or not as a whole, so it is held to its end."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._run: list[int] = []
        # Decoded before what is new, so that nothing is stripped from it as from the start of a text.
        self._anchor: list[int] = []
        self._anchor_text = ""

    def push(self, ids: Iterable[int]) -> str:
        text = ""
        for token_id in ids:
            piece = self._tokenizer.piece(token_id, self._skip)
            if piece is None:
                continue
            if not _is_byte(piece):
                text += self._end_run() + self._decode_next([token_id])
            else:
                self._run.append(token_id)
        return text

    def flush(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        run, self._run = self._run, []
        return self._decode_next(run) if run else ""

    def _decode_next(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(self._anchor + ids, self._skip)[len(self._anchor_text) :]
        self._anchor, self._anchor_text = ids, self._tokenizer.decode(ids, self._skip)
        return text


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


class _WindowStream:
    """Any other decoder: what the last tokens add to the text of those just before them.

    A window that ends in an incomplete character is decoded again with the next token, so that it is
    bounded by the longest character unless the ids are no text at all.
    """

    _LONGEST = 16

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._shown = 0
        self._shown_text = ""

    def push(self, ids: Iterable[int]) -> str:
        text = ""
        for token_id in ids:
            self._window.append(token_id)
            if self._tokenizer.piece(token_id, self._skip) is None:
                self._window.pop()
                continue
            whole = self._tokenizer.decode(self._window, self._skip)
            held = len(self._window) - self._shown
            if whole.endswith(_REPLACEMENT) and held < self._LONGEST:
                continue
            text += whole[len(self._shown_text) :]
            self._window = self._window[self._shown :]
            self._shown = len(self._window)
            self._shown_text = self._tokenizer.decode(self._window, self._skip)
        return text

    def flush(self) -> str:
        whole = self._tokenizer.decode(self._window, self._skip)
        return whole[len(self._shown_text) :]


class StopChecker:
    """Finds stop strings in text that comes in pieces, and keeps every part of one from getting out.

    The string that is complete first wins; of those that end together, the one that began first. Where
    the pieces are cut makes no difference.

    Parameters
    ----------
    stop
        The stop strings; empty ones raise a ValueError.
    include_stop_str_in_output
        Whether the text that is let out ends with the stop string or before it.

    Examples
    --------
    >>> checker = StopChecker(["END"])
    >>> checker.push("one E"), checker.push("N two EN"), checker.push("D three")
    (('one ', None), ('EN two ', None), ('', 'END'))
    """

    def __init__(self, stop: Sequence[str] = (), include_stop_str_in_output: bool = False) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must hold strings that are not empty, not {stop!r}")
        self._stops = [_Progress(text) for text in stop]
        self._include = include_stop_str_in_output
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece.

        Returns
        -------
        tuple[str, str | None]
            The text to let out, and the stop string that ended it, or None; after one all text is dropped.
        """
        if self._found is not None:
            return "", self._found
        if not self._stops:
            return text, None
        whole, held = self._held + text, len(self._held)
        ends = [(held + end, stop.text) for stop in self._stops if (end := stop.push(text))]
        if ends:
            end, start, self._found = min((end, end - len(found), found) for end, found in ends)
            self._held = ""
            return whole[: end if self._include else start], self._found
        keep = max(stop.matched for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """Return what was held back because a stop string could have begun there."""
        held, self._held = self._held, ""
        return held


class _Progress:
    """How much of a stop string the text ends with; a character costs little however much that is.

    The algorithm of Knuth, Morris and Pratt (https://doi.org/10.1137/0206024), whose table grows with the match.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters
        self._borders = [0]  # of the first n characters at n - 1: the longest that they begin and end with

    def push(self, piece: str) -> int:
        """Go on; return the characters of the piece up to where the string is complete, or 0."""
        text, matched = self.text, self.matched
        for taken, char in enumerate(piece, 1):
            while matched and text[matched] != char:
                matched = self._border(matched)
            if text[matched] == char:
                matched += 1
                if matched == len(text):
                    return taken
        self.matched = matched
        return 0

    def _border(self, length: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) < length:
            char, border = text[len(borders)], borders[-1]
            while border and text[border] != char:
                border = borders[border - 1]
            borders.append(border + (text[border] == char))
        return borders[length - 1]
