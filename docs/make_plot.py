"""Draw docs/benchmarks.svg from the figures in benchmarks/results.

    python docs/make_plot.py

The same files give the same bytes. Run it again when one of them has changed.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from minivllm import bench
from minivllm.config import ModelConfig
from minivllm.random_model import SHAPES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OUTPUT = ROOT / "docs" / "benchmarks.svg"
MODEL = "Llama-3.2-1B"  # whose shape all figures are of

WIDTH, EDGE = 900, 28
BAR, BAR_GAP, ROW_GAP = 13, 3, 13  # heights in a panel
HEAD, FOOT = 70, 34  # of a panel: title and legend above its rows, the axis below

# Colours on a light page and on a dark one. The picture brings its own ground, so that it is readable on both.
COLOURS = {
    "ground": ("#ffffff", "#0f141a"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#e3e7ec", "#2a323c"),
    "mark": ("#1f2328", "#e6edf3"),
    "ours": ("#1668c7", "#58a6ff"),
    "rival": ("#8a94a0", "#77818d"),
    "soft": ("#c9d0d8", "#434c58"),
}
STROKED = ("grid", "mark")


@dataclass(frozen=True)
class Bar:
    """Be one bar: how long, how much longer its soft end is, and what is written behind it."""

    colour: str
    value: float
    text: str
    soft_end: float = 0.0


@dataclass(frozen=True)
class Panel:
    """Be one chart of horizontal bars: rows of (name, bars), and a line at 1."""

    title: str
    legend: Sequence[tuple[str, str]]  # colour, words
    one: str  # what the line at 1 is
    unit: str
    rows: Sequence[tuple[str, Sequence[Bar]]]
    label_width: int

    @property
    def height(self) -> int:
        """How much it takes."""
        return HEAD + sum(_row_height(bars) for _, bars in self.rows) + FOOT


def _row_height(bars: Sequence[Bar]) -> int:
    return len(bars) * (BAR + BAR_GAP) - BAR_GAP + ROW_GAP


def _time(seconds: float) -> str:
    """Write a time with three figures."""
    scale, unit = (1.0, "s") if seconds >= 0.2 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    number = seconds * scale
    return f"{number:.{max(2 - math.floor(math.log10(number)), 0)}f} {unit}"


# ---------------------------------------------------------------- the figures


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no figures")
    return found


def _span(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return f"{low:,}" if low == high else f"{low:,} … {high:,}"


def engine_panel(ours: dict[str, Any], rival: dict[str, Any]) -> Panel:
    """Compare whole workloads with the least time that their bytes and operations take."""
    config = ModelConfig.from_dict(SHAPES[MODEL.lower()])
    costs = bench.Costs(config, torch.bfloat16, bench.H200)
    rows = []
    for name, workload in bench.WORKLOADS.items():
        figure = ours["workloads"].get(name)
        if workload.device != "cuda" or figure is None:
            continue
        floor = costs.floor(workload.requests(config.vocab_size))
        bars = [Bar("ours", figure["s"] / floor, f"{_time(figure['s'])} ({figure['s'] / floor:.2f} ×)")]
        other = rival["workloads"].get(name)
        if other is not None:
            best, typical = other["best_s"], other["typical_s"]
            words = f"{_time(best)} ({best / floor:.2f} ×), {_time(typical)}"
            bars.append(Bar("rival", best / floor, words, typical / floor))
        tokens = f"{workload.count} × {_span(workload.prompt_tokens)} in, {_span(workload.new_tokens)} out"
        if workload.prompt_tokens == workload.new_tokens:
            tokens = f"{workload.count} × {_span(workload.prompt_tokens)} in and out"
        rows.append((tokens, bars))
    legend = [("ours", "minivllm, median"), ("rival", f"{rival['engine']}, best run"), ("soft", "typical run")]
    unit = "time in multiples of the floor: the least that the bytes and the operations take"
    return Panel("Requests, all at once: prompt tokens in, answer tokens out", legend, "floor", unit, rows, 212)


def product_panel(kernels: dict[str, Any]) -> Panel:
    """Compare the matrix products of a decode step with cuBLAS."""
    rows = []
    for row in kernels.get("linear", ()):
        if row["name"] == "decode_step":
            words = f"{_time(row['us'] / 1e6)}, cuBLAS {_time(row['torch_us'] / 1e6)}"
            bar = Bar("ours", row["us"] / row["torch_us"], words)
            rows.append((f"{row['num_tokens']} token{'s' if row['num_tokens'] > 1 else ''}", [bar]))
    legend = [("ours", "minivllm, exact")]
    return Panel("Matrix products of a decode step", legend, "cuBLAS", "time in multiples of cuBLAS's", rows, 84)


def attention_panel(kernels: dict[str, Any]) -> Panel:
    """Compare attention over prompts with torch's two."""
    rows = []
    for row in kernels.get("attention", ()):
        found = re.fullmatch(r"prefill (\d+)x(\d+)", row["name"])
        if found is None or "flash" not in row:
            continue
        seconds = row["us"] / 1e6
        flash, cudnn = (seconds * row["tflops"] / row[name] for name in ("flash", "cudnn"))
        bars = [
            Bar("ours", seconds / flash, f"{_time(seconds)}, flash {_time(flash)}"),
            Bar("rival", cudnn / flash, _time(cudnn)),
        ]
        rows.append((f"{found[1]} × {int(found[2]):,}", bars))
    legend = [("ours", "minivllm"), ("rival", "cuDNN")]
    return Panel("Attention over prompts", legend, "flash", "time in multiples of flash attention's", rows, 84)


# ---------------------------------------------------------------- the drawing


def _text(x: float, y: float, words: str, kind: str = "ink", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def _rectangle(kind: str, x: float, y: float, width: float, height: float, radius: float = 2) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="{radius:g}"/>'


def draw_panel(panel: Panel, left: int, top: int, width: int) -> list[str]:
    """Return a panel's elements."""
    out = [_text(left, top + 16, panel.title, "ink title")]
    at = left
    for colour, words in panel.legend:
        out += [_rectangle(colour, at, top + 30, 12, 12), _text(at + 18, top + 40, words, "muted")]
        at += 40 + 7 * len(words)
    start, room = left + panel.label_width, width - panel.label_width
    longest = max([1.0] + [max(b.value, b.soft_end) for _, bars in panel.rows for b in bars])
    writing = max([0] + [len(bar.text) for _, bars in panel.rows for bar in bars]) * 6.6 + 10
    # So that what is written behind the longest bar fits; a bar's end is where its text begins.
    scale = (room - writing) / longest
    steps = (0.25, 0.5, *(m * 10.0**n for n in range(9) for m in (1, 2, 5)))
    step = next((s for s in steps if s * scale >= 44), longest)
    bottom = top + panel.height - FOOT
    for i in range(int(longest / step + 1e-6) + 1):
        x = start + i * step * scale
        out.append(f'<path class="grid" d="M{x:.1f} {top + HEAD - 8}V{bottom}"/>')
        out.append(_text(x, bottom + 15, f"{i * step:g}", "muted small", "middle"))
    out.append(_text(start, bottom + 32, panel.unit, "muted small"))
    y = top + HEAD
    for name, bars in panel.rows:
        height = _row_height(bars) - ROW_GAP
        out.append(_text(start - 10, y + height / 2 + 4.5, name, anchor="end"))
        for bar in bars:
            if bar.soft_end > bar.value:
                out.append(_rectangle("soft", start, y, bar.soft_end * scale, BAR))
            out.append(_rectangle(bar.colour, start, y, bar.value * scale, BAR))
            end = start + max(bar.value, bar.soft_end, 1.0) * scale + 7  # past the line at 1
            kind = "ink" if bar.colour == "ours" else "muted"
            out.append(_text(end, y + BAR - 2.5, bar.text, f"{kind} small"))
            y += BAR + BAR_GAP
        y += ROW_GAP - BAR_GAP
    one = start + scale
    out.append(f'<path class="mark" d="M{one:.1f} {top + HEAD - 8}V{bottom}"/>')
    out.append(_text(one, top + HEAD - 12, panel.one, "ink small", "middle"))
    return out


def _style() -> str:
    def rules(which: int) -> str:
        properties = {name: "stroke" if name in STROKED else "fill" for name in COLOURS}
        halo = f"text{{stroke:{COLOURS['ground'][which]}}}"
        return halo + "".join(f".{name}{{{properties[name]}:{colours[which]}}}" for name, colours in COLOURS.items())

    font = 'text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;'
    font += "paint-order:stroke;stroke-width:4px;stroke-linejoin:round}"  # no grid line through a word
    sizes = "text.title{font-size:15px;font-weight:600}text.small{font-size:12px}"
    lines = "path{fill:none}.mark{stroke-width:1.5;stroke-dasharray:4 3}"
    dark = f"@media(prefers-color-scheme:dark){{{rules(1)}}}"
    return f"<style>{font}{sizes}{lines}{rules(0)}{dark}</style>"


def render(results: Path = RESULTS) -> str:
    """Return the picture of the figures in a folder."""
    ours, rival, kernels = (_read(results / f"{name}.json") for name in ("h200", "vllm_h200", "h200_kernels"))
    if ours is None or rival is None:
        raise FileNotFoundError(f"{results} lacks h200.json or vllm_h200.json")
    if (ours.get("engine"), ours.get("model")) != ("minivllm", "random:llama-3.2-1b"):
        raise ValueError(f"{results / 'h200.json'} is of {ours.get('engine')} with {ours.get('model')}")
    panel = engine_panel(ours, rival)
    inner = WIDTH - 2 * EDGE
    parts = draw_panel(panel, EDGE, EDGE, inner)
    height = EDGE + panel.height
    below = [p for p in (product_panel(kernels), attention_panel(kernels)) if p.rows] if kernels is not None else []
    if below:
        half = (inner - 32) // 2
        for i, small in enumerate(below):
            parts += draw_panel(small, EDGE + i * (half + 32), height + 30, half)
        height += 30 + max(small.height for small in below)
    about = f"{ours['card']}, {MODEL} in bfloat16 with random weights. minivllm at {ours['commit']}, {ours['date']}"
    if below and kernels is not None and kernels["commit"] != ours["commit"]:
        about += f"; its kernels at {kernels['commit']}, {kernels['date']}"
    given = f"The figures of {rival['engine']} were given; they are not measured by this repository."
    for line in (about + ".", given):
        height += 18
        parts.append(_text(EDGE, height + 8, line, "muted small"))
    height += EDGE
    title = f"minivllm and {rival['engine']} on one {ours['card']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n{_style()}\n'
        f"{_rectangle('ground', 0, 0, WIDTH, height, 8)}\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    OUTPUT.write_text(render(), encoding="utf-8")
    print(OUTPUT.relative_to(ROOT))
