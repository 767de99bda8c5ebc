"""Prompts from wherever they are, and a file of results that a killed run goes on with."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from minivllm.request import SamplingParams

_PARAMS = {f.name for f in fields(SamplingParams)} - {"logits_fn"}


@dataclass(frozen=True)
class Job:
    """Be one prompt to answer: text, token ids or messages."""

    index: int
    prompt: str | list[int] | None
    messages: list[Any] | None
    params: SamplingParams
    id: Any = None

    def key(self, model: str) -> str:
        """Return what tells this prompt, with these parameters and this model, from others."""
        what = [model, self.prompt, self.messages, self.params.to_dict()]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def label(self) -> dict[str, Any]:
        """Return what a result begins with."""
        out: dict[str, Any] = {"index": self.index}
        if self.id is not None:
            out["id"] = self.id
        if self.messages is not None:
            out["messages"] = self.messages
        else:
            out["prompt"] = self.prompt
        return out


def read_jobs(
    prompts: Sequence[str], source: str | None, jsonl: bool, whole: bool, chat: bool, given: dict[str, Any]
) -> list[Job]:
    """Return the jobs of the arguments, of a file, or of standard input.

    Raises
    ------
    ValueError
        Nothing to answer, or a line that is no prompt; it is named.
    """
    if prompts and source is not None:
        raise ValueError("give prompts as arguments or --input, not both")
    if prompts:
        return [_text_job(i, prompt, chat, given) for i, prompt in enumerate(prompts)]
    if source is None and sys.stdin.isatty():
        raise ValueError("there is no prompt: give one as an argument, with --input, or on standard input")
    name = "standard input" if source in (None, "-") else str(source)
    text = _read(source)
    if whole:
        jobs = [_text_job(0, text, chat, given)]
    elif jsonl or name.endswith((".jsonl", ".ndjson")):
        jobs = list(_json_jobs(text.split("\n"), name, chat, given))
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        jobs = [_text_job(i, line, chat, given) for i, line in enumerate(lines)]
    if not jobs:
        raise ValueError(f"{name} holds no prompt")
    return jobs


def _read(source: str | None) -> str:
    try:
        raw = sys.stdin.buffer.read() if source in (None, "-") else Path(str(source)).read_bytes()
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source or 'standard input'} is not UTF-8 (byte {error.start})") from None


def _text_job(index: int, text: str, chat: bool, given: dict[str, Any]) -> Job:
    params = SamplingParams(**given)
    if chat:
        return Job(index, None, [{"role": "user", "content": text}], params)
    return Job(index, text, None, params)


def _json_jobs(lines: Iterable[str], name: str, chat: bool, given: dict[str, Any]) -> Iterator[Job]:
    index = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}: "
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}not JSON ({error.msg})") from None
        if not isinstance(item, dict):
            item = {"prompt": item}
        unknown = set(item) - _PARAMS - {"prompt", "messages", "id"}
        if unknown:
            raise ValueError(f"{where}unknown key {sorted(unknown)[0]!r}")
        if ("prompt" in item) == ("messages" in item):
            raise ValueError(f"{where}needs either 'prompt' or 'messages'")
        prompt, messages = item.get("prompt"), item.get("messages")
        if messages is None and not isinstance(prompt, (str, list)):
            raise ValueError(f"{where}a prompt is a text or a list of token ids, not {prompt!r:.40}")
        if chat and isinstance(prompt, str):
            prompt, messages = None, [{"role": "user", "content": prompt}]
        own = {key: value for key, value in item.items() if key in _PARAMS}
        try:
            params = SamplingParams.from_dict({**given, **own})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}{error}") from None
        yield Job(index, prompt, messages, params, item.get("id"))
        index += 1


class ResultFile:
    """Hold results, one JSON object a line, each written when it is there.

    What an earlier run wrote is kept: `done` has its indices. A half-written last line is dropped.

    Raises
    ------
    ValueError
        The file holds something else, or the results of other prompts, parameters or another model.
    """

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self._path, self._keys = path, keys
        self.done: dict[int, bool] = {}  # index: whether it is an answer rather than an error
        self._file: IO[bytes] | None = None  # opened at the first result, so that a run that fails at once leaves none
        if path.is_file():
            os.truncate(path, self._check())

    def _check(self) -> int:
        """Read what is there; return how many bytes of it stay."""
        kept = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # the run was killed while it wrote this
                try:
                    entry = json.loads(line)
                    index, key = entry["index"], entry["key"]
                except (ValueError, TypeError, KeyError):
                    raise ValueError(f"{self._path}, line {number}, is no result of minivllm generate") from None
                if not isinstance(index, int) or not 0 <= index < len(self._keys) or self._keys[index] != key:
                    raise ValueError(
                        f"{self._path} holds results of other prompts, parameters or another model (line {number}): "
                        "name another file, or delete it"
                    )
                self.done[index] = entry.get("error") is None
                kept += len(line)
        return kept

    def write(self, index: int, entry: dict[str, Any]) -> None:
        """Append a result."""
        if self._file is None:
            self._file = self._path.open("ab")
        line = json.dumps({**entry, "key": self._keys[index]}, ensure_ascii=False)
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()
        self.done[index] = entry.get("error") is None

    def close(self) -> None:
        """Close the file; once every result is there, put them in the prompts' order."""
        if self._file is not None:
            self._file.close()
        if len(self.done) < len(self._keys):
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        ordered = sorted(lines, key=lambda line: int(json.loads(line)["index"]))
        if ordered != lines:
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            temporary.write_bytes(b"".join(ordered))
            temporary.replace(self._path)
