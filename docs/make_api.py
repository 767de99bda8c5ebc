"""Write api.md from the docstrings.

python docs/make_api.py          writes it
python docs/make_api.py --check  says whether it is as it would be written
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minivllm import aio, calls, engine, handle, request, timeline, views

TARGET = Path(__file__).parent / "api.md"
WIDTH = 100  # of a signature

# What users meet, in the order in which they meet it.
CHAPTERS: list[tuple[str, list[Any]]] = [
    ("The engine", [engine.BatchEngine, calls.DeltaStream, handle.Handle]),
    ("What goes in", [request.SamplingParams]),
    (
        "What comes out",
        [request.Generation, request.Sample, request.Delta, request.GenerationStats, request.Logprob],
    ),
    (
        "What there is to see",
        [
            views.SlotView,
            views.QueueView,
            views.BlockView,
            views.BlockTable,
            views.EngineStats,
            views.Snapshot,
            timeline.Timeline,
            timeline.Step,
            timeline.Row,
            timeline.Span,
        ],
    ),
    ("For asyncio", [aio.AsyncEngine, aio.AsyncHandle]),
    ("Errors", [request.RequestError, request.EngineClosedError, request.IntegrityError]),
]
# Called by the engine alone.
HIDDEN = {"begin", "admitted", "ended", "preempted", "finish", "collected", "logprobs", "requests"}


def annotation(kind: Any) -> str:
    """Return an annotation as it stands in the source."""
    return kind.__forward_arg__ if hasattr(kind, "__forward_arg__") else str(kind)


def written(parameter: inspect.Parameter) -> str:
    """Return one parameter as it stands in the source."""
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = star + parameter.name
    typed = parameter.annotation is not inspect.Parameter.empty
    if typed:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        text += f" = {parameter.default!r}" if typed else f"={parameter.default!r}"
    return text


def signature(name: str, function: Any, method: bool) -> str:
    """Return a call as it would be written, over several lines where it is long."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[1 if method else 0 :]
    parts = [written(parameter) for parameter in parameters]
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    nothing = found.return_annotation in (inspect.Signature.empty, "None", None)
    result = "" if nothing else f" -> {annotation(found.return_annotation)}"
    text = f"{name}({', '.join(parts)}){result}"
    if len(text) <= WIDTH:
        return text
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def plain(text: str) -> str:
    """Turn reStructuredText's double backquotes into Markdown's single ones."""
    return text.replace("``", "`")


def sections(doc: str) -> Iterator[tuple[str, list[str]]]:
    """Split a docstring at its underlined titles; the first part has none."""
    title, lines = "", []
    source = doc.splitlines()
    for i, line in enumerate(source):
        if i + 1 < len(source) and re.fullmatch(r"-{3,}", source[i + 1]):
            yield title, lines
            title, lines = line, []
        elif not re.fullmatch(r"-{3,}", line):
            lines.append(line)
    yield title, lines


def described(lines: Iterable[str]) -> Iterator[str]:
    """Turn "name : type" and the indented words below it into a list."""
    entry: list[str] = []
    for line in [*lines, "end"]:
        if line.startswith((" ", "\t")):
            entry.append(line.strip())
        elif line.strip():
            if entry:
                name, _, kind = entry[0].partition(" : ")
                words = " ".join(entry[1:])
                yield f"- `{name}`" + (f" ({plain(kind)})" if kind else "") + (f": {plain(words)}" if words else "")
            entry = [line]
    yield ""


def prose(lines: list[str]) -> Iterator[str]:
    """Copy paragraphs; fence what is an example."""
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    for part in re.split(r"\n{2,}", text):
        if part.startswith(">>>"):
            yield f"```pycon\n{part}\n```\n"
        elif part == "::":
            continue
        elif part.startswith("    "):
            yield f"```text\n{textwrap.dedent(part)}\n```\n"
        elif part:
            yield plain(part.removesuffix("::") + (":" if part.endswith("::") else "")) + "\n"


def document(doc: str | None) -> Iterator[str]:
    """Turn one docstring into Markdown."""
    for title, lines in sections(inspect.cleandoc(doc or "")):
        if title:
            yield f"**{title}**\n"
        yield from described(lines) if title in ("Parameters", "Raises", "Returns") else prose(lines)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that this package documents, base classes' first as they stand there."""
    seen: set[str] = set()
    for owner in (*cls.__mro__[1:], cls):
        if not owner.__module__.startswith("minivllm"):
            continue
        for name, member in vars(owner).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            public = not name.startswith("_") and name not in HIDDEN | seen
            if public and inspect.isfunction(function) and function.__doc__:
                seen.add(name)
                yield name, member


def fields_of(cls: type) -> Iterator[str]:
    """Yield the fields of a result, which have no text of their own."""
    if cls is request.SamplingParams or not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        return
    hints = {name: kind for name, kind in cls.__annotations__.items() if name != "work"}
    yield "**Fields**\n"
    for name, kind in hints.items():
        yield f"- `{name}`: `{annotation(kind)}`"
    yield ""


def class_text(cls: type) -> Iterator[str]:
    """Yield one class: what it is, its fields, its methods."""
    yield f"### {cls.__name__}\n"
    own = dataclasses.is_dataclass(cls) or issubclass(cls, (BaseException, tuple)) or cls is views.BlockTable
    if cls is request.SamplingParams or not own:
        made = cls if cls is request.SamplingParams else cls.__init__
        text = signature(cls.__name__, made, method=made is not cls)
        if cls not in (calls.DeltaStream, handle.Handle, aio.AsyncHandle):  # these the engine makes
            yield f"```text\n{text}\n```\n"
    yield from document(cls.__doc__)
    yield from fields_of(cls)
    for name, member in members(cls):
        if isinstance(member, property):
            yield f"#### {cls.__name__}.{name}\n"
            yield from document(member.fget.__doc__ if member.fget else "")
        else:
            static = isinstance(member, staticmethod)
            function = getattr(member, "__func__", member)
            yield f"#### {cls.__name__}.{name}()\n"
            yield f"```text\n{signature(name, function, method=not static)}\n```\n"
            yield from document(function.__doc__)


def render() -> str:
    """Return the whole page."""
    lines = [
        "# API reference\n",
        "Made from the docstrings by `python docs/make_api.py`. The examples are run by the tests: `engine` is a small",
        "engine, `model` its path, `tmp` an empty folder.\n",
        "`from minivllm import BatchEngine, SamplingParams, Handle, Generation, Delta`; the other names live in the",
        "modules that are named with them.\n",
    ]
    for chapter, classes in CHAPTERS:
        links = ", ".join(f"[{cls.__name__}](#{cls.__name__.lower()})" for cls in classes)
        lines.append(f"- {chapter}: {links}")
    lines.append("")
    for chapter, classes in CHAPTERS:
        modules = ", ".join(f"`{name}`" for name in dict.fromkeys(cls.__module__ for cls in classes))
        lines += [f"## {chapter}\n", f"In {modules}.\n"]
        for cls in classes:
            lines += class_text(cls)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> None:
    """Write the page, or compare it."""
    text = render()
    if "--check" not in sys.argv:
        TARGET.write_text(text, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text:
        sys.exit("docs/api.md is stale: python docs/make_api.py")


if __name__ == "__main__":
    main()
