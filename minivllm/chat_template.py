"""A model's chat template: Jinja source from its files, rendered in the immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.config import read_json
from minivllm.keywords import place_of
from minivllm.request import SamplingParams
from minivllm.shown import shown


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """Turns conversations into the text that a model was trained to read.

    Parameters
    ----------
    templates
        Jinja source by name; ``"default"`` is used, ``"tool_use"`` where there are tools.
    special_tokens
        What ``bos_token``, ``eos_token`` and so on stand for in the templates.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(text) for name, text in templates.items()}
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be parsed: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation.

        Raises
        ------
        TypeError
            When a variable has the name of a sampling parameter.
        ValueError
            When the messages are malformed, or the template refuses them.
        """
        check_variables(variables)
        checked = check_messages(messages)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise ValueError(f"the model has no default chat template, only {', '.join(self._templates)}")
        context = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": checked,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(context)
        except Exception as error:  # whatever the template's author, or the sandbox, makes of them
            text = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template refuses these messages: {text}") from error


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise TypeError for what is meant for the engine: a template would pass it over, and nobody would notice."""
    for name, value in variables.items():
        if isinstance(value, SamplingParams):
            raise TypeError(f"{name} is no variable of a chat template: pass it as params")
        if place := place_of(name):
            raise TypeError(f"{name} is no variable of a chat template: {place}")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy a conversation, joining content given as text parts; a ValueError says what is malformed."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError('a conversation is a list of messages such as {"role": "user", "content": "Hi"}')
    if not messages:
        raise ValueError("the conversation holds no message")
    checked = []
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {position} is not an object with a role: {shown(message)}")
        message = dict(message)
        content = message.get("content")
        # Of an assistant or a tool it may be all in other fields, such as tool_calls.
        if content is None and (message["role"] in ("system", "user") or set(message) <= {"role", "content", "name"}):
            raise ValueError(f"message {position} has no 'content': {shown(message)}")
        if isinstance(content, list):
            message["content"] = "\n".join(_text_of(part, position) for part in content)
        elif content is not None and not isinstance(content, str):
            raise ValueError(f"the content of message {position} must be text, not {shown(content)}")
        checked.append(message)
    return checked


def _text_of(part: Any, position: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(f"message {position} has a part that is not text: {shown(part)}")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from None


def read_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Read the chat templates of a model directory, by name; a file of their own comes before the config."""
    templates: dict[str, str] = {}
    configured = tokenizer_config.get("chat_template")
    legacy = path / "chat_template.json"
    if configured is None and legacy.is_file():
        configured = read_json(legacy).get("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for entry in configured:
            if not isinstance(entry, Mapping) or not {"name", "template"} <= set(entry):
                raise ValueError(f"{path}: each chat_template of a list needs a name and a template")
            templates[str(entry["name"])] = str(entry["template"])
    elif isinstance(configured, Mapping):
        templates.update({str(name): str(source) for name, source in configured.items()})
    own = path / "chat_template.jinja"
    if own.is_file():
        templates["default"] = _read_text(own)
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = _read_text(extra)
    return templates
