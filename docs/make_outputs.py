"""Run the Python of a page on the demo model and write what it prints below it.

    python docs/make_outputs.py docs/how-a-prompt-becomes-text.md

A block of Python that is followed by a block of text gets that text anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAIR = re.compile(r"```python\n(.*?)```\n(\n```text\n)?(?(2)(?:.*?)(?=```))", re.DOTALL)


def main() -> None:
    """Rewrite the pages named on the command line."""
    sys.path.insert(0, str(ROOT / "examples"))
    from demo_model import demo_model

    model = str(demo_model())
    for path in map(Path, sys.argv[1:]):
        namespace: dict[str, object] = {}

        def run(found: re.Match[str], namespace: dict[str, object] = namespace) -> str:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(found[1].replace("path/to/model", model), namespace)
            block = f"```python\n{found[1]}```\n"
            lines = "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())
            return f"{block}{found[2]}{lines}" if found[2] else block

        path.write_text(PAIR.sub(run, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
