"""Chat templates: what they may use, what they may not, and which messages they are given."""

from __future__ import annotations

import pytest
from texts import CHAT
from tiny import CHAT_TEMPLATE, byte_level_tokenizer

from minivllm.tokenizer import Tokenizer


def rendered(template: str, messages=CHAT, **variables) -> str:
    return Tokenizer(byte_level_tokenizer(), {}, {"default": template}).render_chat(messages, **variables)


def test_what_templates_may_use() -> None:
    assert rendered('{{ {"b": "<é>", "a": 1} | tojson }}') == '{"b": "<é>", "a": 1}'
    assert len(rendered("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert rendered("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}") == "x"
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
