"""Text streamed in whole characters that join to the whole, and stopped without a leak."""

from __future__ import annotations

import doctest
import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from texts import TEXTS, TOKENIZERS, sentencepiece, stream

from minivllm import detokenizer
from minivllm.tokenizer import Detokenizer, StopChecker, Tokenizer


def test_kinds_of_decoders() -> None:
    kinds = {name: tokenizer.decoder_kind for name, tokenizer in TOKENIZERS.items()}
    assert kinds == {
        "byte level": "bytes",
        "sentencepiece": "byte_fallback",
        "word pieces": "other",
        "metaspace": "other",
    }


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_streams_of_text(kind: str, skip: bool, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    streaming = Detokenizer(tokenizer, skip)
    pieces = [streaming.push([i]) for i in ids]
    pieces.append(streaming.flush())
    whole = tokenizer.decode(ids, skip)
    assert "".join(pieces) == whole
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    if kind == "byte level":
        # No later than it can be: each character comes with the token that completes it.
        for count in range(len(ids)):
            known = tokenizer.decode(ids[: count + 1], skip).rstrip("\ufffd")
            assert "".join(pieces[: count + 1]).startswith(known)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_streams_of_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 3), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    skip = data.draw(st.booleans())
    bounds = [0, *cuts, len(ids)]
    pushes = [ids[a:b] for a, b in pairwise(bounds)]
    assert stream(tokenizer, pushes, skip) == tokenizer.decode(ids, skip)


def test_lone_bytes_and_spaces_of_sentencepiece() -> None:
    tokenizer = sentencepiece()
    by_piece = tokenizer._backend.get_vocab()
    for pieces in (
        ["<0xE6>", "<0xBC>", "<0xA2>", "▁a", "<0xE6>", "lo"],
        ["▁", "▁a", "▁", "▁"],
        ["<0xE6>", "</s>", "<0xBC>", "<0xA2>", "▁a"],
        ["<s>", "▁the", "<0xFF>", "<0xE6>", "<0xBC>", "<0xA2>"],
    ):
        ids = [by_piece[piece] for piece in pieces]
        for skip in (True, False):
            assert stream(tokenizer, [[i] for i in ids], skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_work_per_token_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[kind]
    decoded: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        decoded.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    ids = tokenizer.encode("hello there 漢 é ") * 50
    monkeypatch.setattr(Tokenizer, "decode", counted)
    stream(tokenizer, [[i] for i in ids], True)
    assert max(decoded, default=0) <= 20
    assert sum(decoded) <= 10 * len(ids)


def stopped(pieces: list[str], stop: list[str], include: bool = False) -> tuple[str, str | None]:
    """Push pieces until a stop string is found; give all text let out, and the string."""
    checker = StopChecker(stop, include)
    text = ""
    for piece in pieces:
        out, found = checker.push(piece)
        text += out
        if found is not None:
            assert checker.push("more") == ("", found)
            assert checker.flush() == ""
            return text, found
        for s in stop:
            assert s not in text
    return text + checker.flush(), None


def test_stop_string_over_four_tokens() -> None:
    checker = StopChecker(["<stop>"])
    outs = [checker.push(piece) for piece in ("ab <", "st", "o", "p> x")]
    assert outs == [("ab ", None), ("", None), ("", None), ("", "<stop>")]
    assert stopped(["ab <", "st", "o", "p> x"], ["<stop>"], include=True) == ("ab <stop>", "<stop>")
    assert stopped(["ab <", "st", "o", "q"], ["<stop>"]) == ("ab <stoq", None)
    assert stopped(["aa", "aab"], ["aab"]) == ("aa", "aab")


def test_first_complete_stop_string_wins() -> None:
    assert stopped(["one two"], ["two", "ne"]) == ("o", "ne")
    assert stopped(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert stopped(["abc"], ["bc", "abc"]) == ("", "abc")
    assert stopped(["x"], []) == ("x", None)


def test_long_stop_strings_that_almost_match_cost_little() -> None:
    """Each of the texts is held back whole; looked for anew at every piece they would take minutes."""
    length = 20_000
    checker = StopChecker(["#" * (length + i) + "A" for i in range(16)])
    begun = time.perf_counter()
    for _ in range(length):
        assert checker.push("#") == ("", None)
    assert checker.push("B") == ("#" * length + "B", None)
    assert time.perf_counter() - begun < 10


def test_stop_strings_are_checked() -> None:
    for bad in ([""], "abc", [None]):
        with pytest.raises(ValueError, match="stop"):
            StopChecker(bad)  # type: ignore[arg-type]


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
    include=st.booleans(),
)
@example(text="aabaabaaa", stop=["aabaaa"], cuts=[1, 2, 3, 4, 5, 6, 7, 8], include=False)
def test_stops_wherever_the_text_is_cut(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if ends:
        end, start, found = min(ends)
        expected = (text[: end if include else start], found)
    else:
        expected = (text, None)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert stopped(pieces, stop, include) == expected


def test_examples_of_the_docstrings() -> None:
    result = doctest.testmod(detokenizer)
    assert result.attempted >= 8 and result.failed == 0
