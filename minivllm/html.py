"""Pictures of the engine for notebooks, and the same as text: pure functions from views to strings.

Styles are inline and take the page's own colours, so that they read on light and on dark; all text is escaped.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.request import Generation
    from minivllm.views import BlockView, EngineStats, QueueView, SlotView

_GOLDEN = 0.618033988749895
_MAX_ROWS = 64  # of a table; more are counted
_MAX_CELLS = 2048  # of a map; larger pools share cells
_COLUMNS = 64  # cells a line of a map
_GREY = "rgba(128,128,128,{})"
_BOX = "font:13px/1.5 system-ui,sans-serif;color:inherit;background:none;margin:4px 0"
_CELL = "padding:1px 10px 1px 0;text-align:left;white-space:nowrap;border:0;background:none;color:inherit"


def hue_of(request_id: int) -> float:
    """Return a request's hue, 0 to 1: far apart for neighbours."""
    return (request_id * _GOLDEN) % 1.0


def colour_of(request_id: int, phase: str = "decode") -> tuple[float, float, float]:
    """Return a request's colour as red, green, blue; the prompt's darker than the answer's."""
    lightness, saturation = (0.42, 0.65) if phase == "prefill" else (0.68, 0.55)
    return colorsys.hls_to_rgb(hue_of(request_id), lightness, saturation)


def css_of(request_id: int, phase: str = "decode") -> str:
    """Return a request's colour as ``#rrggbb``."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour_of(request_id, phase))


def name_of(request_id: int, sample: int) -> str:
    """Return how a sample is called: the request's number, and the sample's where it is not the first."""
    return f"{request_id}.{sample}" if sample else str(request_id)


# ---------------------------------------------------------------- text


def _aligned(rows: Sequence[Sequence[Any]], right: Iterable[int] = ()) -> str:
    """Lay rows out in columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    right = set(right)
    return "\n".join(
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ).replace(" \n", "\n")


def _some(items: Sequence[Any]) -> tuple[Sequence[Any], str]:
    left = len(items) - _MAX_ROWS
    return (items[:_MAX_ROWS], f"and {left} more") if left > 0 else (items, "")


def _tokens(view: SlotView) -> str:
    """Say how far a slot is: prompt tokens computed, or prompt and answer, and the limit."""
    if view.phase == "prefill":
        return f"{view.num_computed} of {view.num_tokens} computed"
    return f"{view.prompt_tokens} + {view.num_tokens - view.prompt_tokens} of {view.limit}"


def _split(slots: Sequence[SlotView]) -> tuple[list[SlotView], str]:
    busy = [view for view in slots if view.request_id is not None]
    free = len(slots) - len(busy)
    return busy, f"{free} of {len(slots)} slots free"


def slots_text(slots: Sequence[SlotView]) -> str:
    """Return the slots as an aligned table, the free ones counted."""
    busy, free = _split(slots)
    shown, more = _some(busy)
    rows: list[Sequence[Any]] = [("slot", "request", "phase", "tokens", "blocks", "cached")]
    rows += [
        (v.slot, name_of(v.request_id, v.sample), v.phase, _tokens(v), len(v.blocks), v.cached_tokens) for v in shown
    ]
    return "\n".join([*([_aligned(rows, (0, 1, 4, 5))] if busy else []), *([more] if more else []), free])


def queue_text(queue: Sequence[QueueView]) -> str:
    """Return the queue as an aligned table, front first."""
    if not queue:
        return "the queue is empty"
    shown, more = _some(queue)
    rows: list[Sequence[Any]] = [("place", "request", "prompt", "tokens", "preempted")]
    rows += [
        (i, name_of(q.request_id, q.sample), q.prompt_tokens, q.num_tokens, q.preemptions) for i, q in enumerate(shown)
    ]
    return "\n".join([_aligned(rows, range(5)), *([more] if more else [])])


def stats_text(stats: EngineStats) -> str:
    """Return the counters, one a line."""
    rows = [(f.name.replace("_", " "), f"{getattr(stats, f.name):,}") for f in fields(stats)]
    return _aligned(rows, (1,))


def blocks_text(blocks: Sequence[BlockView]) -> str:
    """Return the pool as a map of letters, 64 blocks a line."""
    letters = "".join(_letter(block) for block in blocks[:_MAX_CELLS])
    lines = [f"{i:6}  {letters[i : i + _COLUMNS]}" for i in range(0, len(letters), _COLUMNS)]
    if len(blocks) > _MAX_CELLS:
        lines.append(f"        and {len(blocks) - _MAX_CELLS} more")
    return "\n".join([*lines, _sum_of(blocks)])


def _letter(block: BlockView) -> str:
    if block.state != "owned":
        return {"free": ".", "cached": "c"}[block.state]
    return "#" if block.refs > 1 else str(block.owners[0][0] % 10)


def _sum_of(blocks: Sequence[BlockView]) -> str:
    count = Counter(block.state for block in blocks)
    shared = sum(block.refs > 1 for block in blocks)
    return (
        f"{len(blocks)} blocks: {count['owned']} owned (0-9: the request's last digit; # shared: {shared}), "
        f"{count['cached']} cached (c), {count['free']} free (.)"
    )


def table_text(rows: Sequence[Sequence[int]]) -> str:
    """Return a block table, the blocks of each row that has any."""
    used = [(f"slot {i}", " ".join(str(b) for b in row if b >= 0)) for i, row in enumerate(rows) if row[0] >= 0]
    shape = f"{len(rows)} slots, up to {len(rows[0])} blocks each"
    return "\n".join([*([_aligned(used, (0,))] if used else []), f"{shape}; {len(rows) - len(used)} rows empty"])


def generation_text(generation: Generation) -> str:
    """Return an answer for people: a line about it, then the text, or the texts of all samples."""
    lines = [_about(generation)]
    if len(generation.samples) > 1:
        lines += [f"[{s.sample}] {s.text} ({s.finish_reason})" for s in generation.samples]
    elif generation.text:
        lines.append(generation.text)
    elif generation.token_ids:
        lines.append(str(generation.token_ids))
    return "\n".join(lines)


def _about(generation: Generation) -> str:
    stats, reason = generation.stats, generation.finish_reason
    known = generation.request_id >= 0  # False for a prompt that was refused before it became a request
    name = f"request {generation.request_id}" if known else f"prompt {generation.index}"
    if generation.error is not None:
        return f"{name}: error: {generation.error}"
    stop = f" at {generation.stop_reason!r}" if generation.stop_reason is not None else ""
    parts = [
        f"{name}: {reason}{stop}",
        f"{len(generation.prompt_token_ids)} + {len(generation.token_ids)} tokens",
        f"first after {stats.ttft:.3f} s",
    ]
    if stats.decode_tokens_per_s:
        parts.append(f"{stats.decode_tokens_per_s:.1f} tokens/s")
    if stats.cached_tokens:
        parts.append(f"{stats.cached_tokens} cached")
    return ", ".join(parts)


# ---------------------------------------------------------------- HTML


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """Build a table of cells that are HTML already."""
    line = f"border-bottom:1px solid {_GREY.format(0.4)}"
    top = "".join(f'<th style="{_CELL};font-weight:600;{line}">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr style="background:none">{"".join(f"""<td style="{_CELL}">{cell}</td>""" for cell in row)}</tr>'
        for row in rows
    )
    head_row = f'<tr style="background:none">{top}</tr>' if body else ""
    foot = f'<div style="opacity:.7">{note}</div>' if note else ""
    table = f'<table style="border-collapse:collapse;margin:0;color:inherit">{head_row}{body}</table>' if body else ""
    return f'<div style="{_BOX}">{table}{foot}</div>'


def _chip(request_id: int, sample: int) -> str:
    square = f"display:inline-block;width:9px;height:9px;border-radius:2px;background:{css_of(request_id)}"
    return f'<span style="{square}"></span> {name_of(request_id, sample)}'


def _bar(view: SlotView) -> str:
    """Draw how much of the limit is computed: the prompt's part darker than the answer's."""
    if view.request_id is None or view.limit <= 0:
        return ""
    prompt = min(view.num_computed, view.prompt_tokens)
    widths = (100 * prompt / view.limit, 100 * (view.num_tokens - view.prompt_tokens) / view.limit)
    parts = "".join(
        f'<div style="width:{width:.2f}%;background:{css_of(view.request_id, phase)}"></div>'
        for width, phase in zip(widths, ("prefill", "decode"), strict=True)
    )
    box = f"display:flex;width:180px;height:10px;border-radius:3px;overflow:hidden;background:{_GREY.format(0.22)}"
    return f'<div style="{box}">{parts}</div>'


def slots_html(slots: Sequence[SlotView]) -> str:
    """Return the slots as a table with a bar for each that is taken."""
    busy, free = _split(slots)
    shown, more = _some(busy)
    rows = [
        (
            str(v.slot),
            _chip(v.request_id or 0, v.sample),
            escape(v.phase),
            _bar(v),
            _tokens(v),
            str(len(v.blocks)),
            str(v.cached_tokens),
        )
        for v in shown
    ]
    head = ("slot", "request", "phase", "progress", "tokens", "blocks", "cached")
    return _table(head, rows, "; ".join(part for part in (more, free) if part))


def queue_html(queue: Sequence[QueueView]) -> str:
    """Return the queue as a table, front first."""
    shown, more = _some(queue)
    rows = [
        (
            str(i),
            _chip(q.request_id, q.sample),
            str(q.prompt_tokens),
            str(q.num_tokens - q.prompt_tokens),
            str(q.preemptions),
        )
        for i, q in enumerate(shown)
    ]
    return _table(("place", "request", "prompt", "answer", "preempted"), rows, more if rows else "the queue is empty")


def stats_html(stats: EngineStats) -> str:
    """Return the counters as a table."""
    return _table(("counter", ""), [(f.name.replace("_", " "), f"{getattr(stats, f.name):,}") for f in fields(stats)])


def _cell(group: Sequence[BlockView]) -> tuple[str, str]:
    """Return a cell's SVG attributes and its words: one block, or several in a large pool."""
    first, count = group[0], Counter(block.state for block in group)
    state = count.most_common(1)[0][0]
    if len(group) == 1:
        words = f"block {first.block}: {first.state}"
        if first.owners:
            words = f"block {first.block}: request {', '.join(name_of(*owner) for owner in first.owners)}"
    else:
        parts = ", ".join(f"{number} {name}" for name, number in count.most_common())
        words = f"blocks {first.block} to {group[-1].block}: {parts}"
    if state == "free":
        return f'fill="none" stroke="{_GREY.format(0.45)}"', words
    if state == "cached":
        return f'fill="{_GREY.format(0.5)}" stroke="{_GREY.format(0.5)}"', words
    owner = Counter(block.owners[0][0] for block in group if block.owners).most_common(1)[0][0]
    shared = any(block.refs > 1 for block in group)
    edge = "currentColor" if shared else css_of(owner)
    return f'fill="{css_of(owner)}" stroke="{edge}" stroke-width="{2 if shared else 1}"', words


def blocks_html(blocks: Sequence[BlockView]) -> str:
    """Return a map of the block pool: coloured by owner, the shared ones framed, the cached ones grey."""
    a_cell = -(-len(blocks) // _MAX_CELLS) or 1
    groups = [blocks[i : i + a_cell] for i in range(0, len(blocks), a_cell)]
    pitch, cells = 12, []
    for i, group in enumerate(groups):
        style, words = _cell(group)
        x, y = i % _COLUMNS * pitch + 2, i // _COLUMNS * pitch + 2
        cells.append(f'<rect x="{x}" y="{y}" width="8" height="8" rx="2" {style}><title>{escape(words)}</title></rect>')
    width = min(len(groups), _COLUMNS) * pitch + 2
    height = -(-len(groups) // _COLUMNS) * pitch + 2
    count = Counter(block.state for block in blocks)
    shared = sum(block.refs > 1 for block in blocks)
    note = (
        f"{len(blocks)} blocks: {count['owned']} owned (coloured by request; {shared} shared, framed), "
        f"{count['cached']} cached (grey), {count['free']} free"
    )
    if a_cell > 1:
        note += f"; {a_cell} blocks a cell"
    svg = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%;color:inherit" '
        f'role="img" aria-label="{escape(note)}">{"".join(cells)}</svg>'
    )
    return f'<div style="{_BOX}">{svg}<div style="opacity:.7">{note}</div></div>'


def table_html(rows: Sequence[Sequence[int]]) -> str:
    """Return a block table: the blocks of each row that has any."""
    used = [(i, [b for b in row if b >= 0]) for i, row in enumerate(rows) if row[0] >= 0]
    cells = [(str(i), str(len(blocks)), " ".join(map(str, blocks))) for i, blocks in used]
    wrap = [
        (slot, number, f'<div style="white-space:normal;max-width:640px">{row}</div>') for slot, number, row in cells
    ]
    note = f"{len(rows)} slots, up to {len(rows[0])} blocks each; {len(rows) - len(used)} rows empty"
    return _table(("slot", "blocks", "in order"), wrap, note)


def generation_html(generation: Generation) -> str:
    """Return an answer with its prompt and a line about it."""
    text = "white-space:pre-wrap;margin:2px 0 2px 0;padding-left:8px"
    parts = [f'<div style="opacity:.7">{escape(_about(generation))}</div>']
    if generation.prompt is not None:
        parts.append(f'<div style="{text};opacity:.75">{escape(generation.prompt)}</div>')
    for sample in generation.samples:
        name = f"[{sample.sample}] " if len(generation.samples) > 1 else ""
        body = sample.text or ("" if not sample.token_ids else str(sample.token_ids))
        edge = f"border-left:3px solid {css_of(generation.request_id)}"
        parts.append(f'<div style="{text};{edge}">{name}{escape(body)}</div>')
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def title_html(title: str) -> str:
    """Return a line that heads further pictures."""
    return f'<div style="{_BOX};font-weight:600">{escape(title)}</div>'
