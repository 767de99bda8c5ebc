"""Text to ids and back, equal to transformers' on the same files."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from texts import CHAT, TEXTS, TOKENIZERS, byte_level, stream
from tiny import VOCAB_SIZE, byte_level_tokenizer, save_tokenizer

from minivllm.tokenizer import Tokenizer


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
    check_against_transformers(demo_model, [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "def f(x):\n    return x"])
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


def test_directories_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has tokenizer_config\.json but no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
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


def test_vocabulary_size() -> None:
    assert byte_level().vocab_size == VOCAB_SIZE
