"""Chat templates: what they may use, what they may not, and which messages they are given."""

from __future__ import annotations

import pytest
from texts import CHAT
from tiny import CHAT_TEMPLATE, byte_level_tokenizer

from minivllm import SamplingParams
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


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "text": "x"}, {"role": "assistant", "content": None}]
)
def test_a_message_without_content_is_named(message) -> None:
    with pytest.raises(ValueError, match=r"^message 1 has no 'content': \{'role'"):
        rendered(CHAT_TEMPLATE, [{"role": "user", "content": ""}, message])


def test_what_an_assistant_calls_may_stand_for_its_content() -> None:
    template = "{{ messages[0].tool_calls | length }}"
    assert rendered(template, [{"role": "assistant", "content": None, "tool_calls": [{}]}]) == "1"


@pytest.mark.parametrize("name", [*SamplingParams.__dataclass_fields__, "max_new_tokens"])
def test_sampling_parameters_are_no_variables(name) -> None:
    field = "max_tokens" if name == "max_new_tokens" else name
    with pytest.raises(TypeError, match=rf"^{name} is no variable .*SamplingParams\({field}=\.\.\.\)$"):
        rendered("x", **{name: 1})
    with pytest.raises(TypeError, match="pass it as params"):
        rendered("x", sampling_params=SamplingParams())
