"""Text: equal to transformers' on the same files, streamed in whole characters, stopped without a leak."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, VOCAB_SIZE, byte_level_tokenizer, save_tokenizer, sentencepiece_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from minivllm.tokenizer import Detokenizer, StopChecker, Tokenizer

TEXTS = [
    "a👩‍👩‍👧 é 漢",
    "hello there, the quick  brown fox",
    "  leading and trailing  ",
    "line\r\n\tbreaks\n\n",
    "What is 2+2? it's 1234567.",
    "日本語 😀 한국어",
    "<|turn|>user\nhi<|end|>\n",
    "a\u0301 \u200d \ufffd",
    "",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France? 😀"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "  And <|end|> of Spain?\n"},
]


def byte_level() -> Tokenizer:
    specials = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return Tokenizer(byte_level_tokenizer(), specials, {"default": CHAT_TEMPLATE})


def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"})


def word_pieces() -> Tokenizer:
    """A decoder that is neither of the two that are common: pieces joined by the vocabulary's own marks."""
    words = ["[UNK]", "[CLS]", "hel", "##lo", "the", "##re", "漢", "é", ".", "it", "##s"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[CLS]"])
    return Tokenizer(backend)


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece(), "word pieces": word_pieces()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return directory


@pytest.fixture
def files(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved tokenizer's directory, to be changed."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    return tokenizer


def configure(path: Path, **fields) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def check_against_transformers(path: Path, texts: list[str]) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load(path), AutoTokenizer.from_pretrained(path)
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    for add in (True, False):
        ids = theirs.apply_chat_template(CHAT, add_generation_prompt=add, return_dict=False)
        assert ours.apply_chat_template(CHAT, add_generation_prompt=add) == ids
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.bos_id == theirs.bos_token_id


def test_tiny_equals_transformers(saved: Path) -> None:
    check_against_transformers(saved, TEXTS)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_flags_in_the_config_equal_transformers(bos: bool, eos: bool, files: Path) -> None:
    configure(files, add_bos_token=bos, add_eos_token=eos)
    check_against_transformers(files, ["hello", ""])


@pytest.mark.time_limit(300)
def test_demo_model_equals_transformers(demo_model: Path) -> None:
    check_against_transformers(
        demo_model, [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "def f(x):\n    return x"]
    )
    tokenizer = load(demo_model)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert stream(tokenizer, [[i] for i in ids], True) == tokenizer.decode(ids)


def test_begin_of_text_is_never_doubled(saved: Path, files: Path) -> None:
    tokenizer = load(saved)
    ids = tokenizer.apply_chat_template(CHAT)
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    # The rendered chat begins with the token's text, and encode would add another.
    assert tokenizer.encode(tokenizer.render_chat(CHAT)) == ids
    assert tokenizer.encode("hello")[0] == tokenizer.bos_id
    (files / "chat_template.jinja").write_text("{{ bos_token }}{{ bos_token }}hi")
    assert load(files).apply_chat_template(CHAT).count(0) == 1


def test_where_templates_come_from(files: Path) -> None:
    own = files / "chat_template.jinja"
    own.write_text("own")
    configure(files, chat_template="config")
    (files / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load(files).render_chat(CHAT) == "own"
    own.unlink()
    assert load(files).render_chat(CHAT) == "config"
    configure(files, chat_template=None)
    assert load(files).render_chat(CHAT) == "json"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    configure(files, chat_template=named)
    assert load(files).render_chat(CHAT) == "plain"
    assert load(files).render_chat(CHAT, tools=[{"name": "f"}]) == "f"
    configure(files, chat_template=None)
    (files / "chat_template.json").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        load(files).apply_chat_template(CHAT)


def rendered(template: str, messages=CHAT, **variables) -> str:
    return Tokenizer(byte_level_tokenizer(), {}, {"default": template}).render_chat(messages, **variables)


def test_what_templates_may_use() -> None:
    assert rendered('{{ {"b": "<é>", "a": 1} | tojson }}') == '{"b": "<é>", "a": 1}'
    assert len(rendered("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert (
        rendered("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}") == "x"
    )
    assert rendered("{% generation %}in{% endgeneration %}") == "in"
    assert rendered("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert rendered("{{ thinking }}", thinking=True) == "True"
    assert rendered("{{ documents is none }}{{ tools is none }}") == "TrueTrue"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined|refuses"),
        ("{{ 1 + 'x' }}", "refuses these messages"),
        ("{% if %}", "cannot be parsed"),
    ],
)
def test_what_templates_may_not(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rendered(template)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"content": "x"}],
        ["x"],
        [{"role": "user", "content": 5}],
        [{"role": 1, "content": "x"}],
        None,
    ],
)
def test_malformed_messages(messages) -> None:
    with pytest.raises(ValueError, match="message"):
        rendered(CHAT_TEMPLATE, messages)


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    with pytest.raises(ValueError, match="not text"):
        rendered("x", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_directories_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has tokenizer_config\.json but no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_padding_and_truncation_of_the_file_are_off(files: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=100)
    backend.save(str(files / "tokenizer.json"))
    tokenizer = load(files)
    assert tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_above_the_vocabulary_leave_no_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("hello there")
    padded = [tokenizer.vocab_size, *ids, tokenizer.vocab_size + 7, 2**31, 2**40, -1]
    assert tokenizer.decode(padded) == tokenizer.decode(ids)
    assert stream(tokenizer, [[i] for i in padded], True) == tokenizer.decode(ids)
    assert tokenizer.token_text(tokenizer.vocab_size) == ""


def test_token_text() -> None:
    tokenizer = byte_level()
    assert tokenizer.token_text(1) == "<|end|>"
    ids = tokenizer.encode("hello")[1:]
    assert "".join(map(tokenizer.token_text, ids)) == "hello"


def test_text_that_is_no_unicode() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")).startswith("a\ufffd")
    with pytest.raises(ValueError, match="must be a str"):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]


def test_eight_threads() -> None:
    tokenizer = byte_level()
    expected = [tokenizer.encode(text) for text in TEXTS]
    chat = tokenizer.apply_chat_template(CHAT)
    failures: list[object] = []

    def work() -> None:
        try:
            for _ in range(60):
                assert [tokenizer.encode(text) for text in TEXTS] == expected
                assert tokenizer.apply_chat_template(CHAT) == chat
                for ids in expected:
                    assert stream(tokenizer, [[i] for i in ids], True) == tokenizer.decode(ids)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def stream(tokenizer: Tokenizer, pushes: list[list[int]], skip: bool) -> str:
    """Join the pieces, having checked that none was taken back or ends within a character."""
    detokenizer = Detokenizer(tokenizer, skip)
    pieces = [detokenizer.push(ids) for ids in pushes]
    return "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_streams_of_text(kind: str, skip: bool, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, skip)
    pieces = [detokenizer.push([i]) for i in ids]
    pieces.append(detokenizer.flush())
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


def test_vocabulary_size() -> None:
    assert byte_level().vocab_size == VOCAB_SIZE
