"""``minivllm chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from minivllm.commands.options import make_engine, sampling
from minivllm.request import SamplingParams

if TYPE_CHECKING:
    from minivllm.engine import BatchEngine

HELP = "/exit leaves, /reset forgets the conversation, Ctrl-C stops an answer"


def run(args: argparse.Namespace) -> int:
    """Talk until /exit or the end of the input."""
    from minivllm.intake import need_tokenizer

    params = SamplingParams(**sampling(args))
    first = [{"role": "system", "content": args.system}] if args.system else []
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (lines can be edited where it is)
    with make_engine(args, progress=terminal, num_slots=1) as engine:
        tokenizer = need_tokenizer(engine.tokenizer, "chat")
        tokenizer.render_chat([{"role": "user", "content": ""}])  # says now if there is no template
        if terminal:
            print(f"({HELP})")
        messages = list(first)
        while True:
            try:
                line = input("> " if terminal else "").strip()
            except EOFError:
                return 0
            if line in ("/exit", "/quit"):
                return 0
            if line == "/reset":
                messages = list(first)
            elif line == "/help":
                print(HELP)
            elif line.startswith("/"):
                print(f"There is no {line.split()[0]}: {HELP}", file=sys.stderr)
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    ids = tokenizer.apply_chat_template(messages)
                    reply = _speak(engine, ids, params)
                except ValueError as error:  # too long by now, or refused by the template
                    messages.pop()
                    print(f"minivllm: {error} (/reset forgets the conversation)", file=sys.stderr)
                    continue
                messages.append({"role": "assistant", "content": reply})


def _speak(engine: BatchEngine, ids: list[int], params: SamplingParams) -> str:
    """Print an answer as it comes, and return it; Ctrl-C ends it early."""
    text = ""
    with engine.stream(ids, params) as deltas:
        try:
            for delta in deltas:
                print(delta.text, end="", flush=True)
                text += delta.text
                if delta.finish_reason == "error":
                    print("\nminivllm: the answer ended with an error", file=sys.stderr)
        except KeyboardInterrupt:
            deltas.close()
    print()
    return text
