"""What an error message shows of what it was given."""

from __future__ import annotations


def shown(value: object, most: int = 80) -> str:
    """Return what an error message shows of a value: its beginning, on one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of more digits than Python prints
        text = "a very large int"
    except RecursionError:
        text = f"a {type(value).__name__} nested too deeply to be shown"
    return text if len(text) <= most else f"{text[:most]}…"
