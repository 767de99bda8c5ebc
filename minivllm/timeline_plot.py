"""The timeline as a matplotlib figure."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from minivllm.html import colour_of, name_of
from minivllm.timeline import Span, Step, end_of, seconds_of, spans_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 10.0  # inches
_LETTER = 0.0105  # of the figure's width that a letter of a label takes
_GREY = {"prefill": "0.35", "decode": "0.72"}  # in the legend


def plot(steps: Sequence[Step], x: Literal["time", "step"]) -> Figure:
    """Draw slots down and time (or steps) across, prefill and decode in two shades; queue and free blocks below."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plot needs matplotlib: pip install 'minivllm[plot]'") from None
    if x not in ("time", "step"):
        raise ValueError(f"x must be 'time' or 'step', not {x!r}")

    class Picture(Figure):
        """A figure that notebooks show although pyplot knows nothing of it."""

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=80)
            return out.getvalue()

    spans = spans_of(steps)
    if x == "time":
        edges = [step.start for step in steps] + ([end_of(steps, len(steps) - 1)] if steps else [0.0])
        first = edges[0]
        edges = [edge - first for edge in edges]
        bounds = [(start - first, end - first) for start, end in (seconds_of(steps, span) for span in spans)]
    else:
        edges = [float(i) for i in range(len(steps) + 1)]
        bounds = [(float(span.start), float(span.end)) for span in spans]

    num_slots = 1 + max((span.slot for span in spans), default=0)
    rows = min(max(0.34 * num_slots, 1.0), 9.0)  # inches
    figure = Picture(figsize=(_WIDTH, rows + 3.0), layout="constrained")
    bars, queue, blocks = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [rows, 0.8, 0.8]})
    _draw_slots(bars, steps, spans, bounds, lambda i: edges[i], edges[-1])
    bars.set(ylabel="slot", ylim=(num_slots - 0.4, -0.6))
    bars.set_yticks(range(0, num_slots, -(-num_slots // 16)))

    queue.stairs([step.queued for step in steps], edges, fill=True, color="tab:red", alpha=0.6)
    queue.set(ylabel="queued", ylim=(0, None))
    blocks.stairs([step.free_blocks for step in steps], edges, fill=True, color="tab:blue", alpha=0.6)
    blocks.set(ylabel="free blocks", xlabel="seconds" if x == "time" else "step", ylim=(0, None))
    blocks.set_xlim(0, edges[-1] or 1)
    for axes in (queue, blocks):
        axes.yaxis.get_major_locator().set_params(integer=True, nbins=3)
    figure.align_ylabels([bars, queue, blocks])
    return figure


def _draw_slots(
    axes: Axes,
    steps: Sequence[Step],
    spans: Sequence[Span],
    bounds: Sequence[tuple[float, float]],
    edge: Callable[[int], float],
    width: float,
) -> None:
    """Draw a bar a span, a label a request where there is room, a cross where one was sent back."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    by_slot: dict[int, list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        by_slot[span.slot].append(i)
    tall = len(by_slot) <= 24  # labels fit into a line
    for slot, numbers in by_slot.items():
        pieces = [(bounds[i][0], bounds[i][1] - bounds[i][0]) for i in numbers]
        colours = [colour_of(spans[i].request_id, spans[i].phase) for i in numbers]
        axes.broken_barh(pieces, (slot - 0.41, 0.82), facecolors=colours)
        visits: list[list[int]] = []
        for i in numbers:
            if visits and spans[visits[-1][-1]][1:3] == spans[i][1:3] and spans[visits[-1][-1]].end == spans[i].start:
                visits[-1].append(i)
            else:
                visits.append([i])
        for visit in visits if tall else []:
            widest = max(visit, key=lambda i: bounds[i][1] - bounds[i][0])
            start, end = bounds[widest]
            name = name_of(*spans[widest][1:3])
            if end - start >= width * _LETTER * (len(name) + 0.4):
                ink = "white" if spans[widest].phase == "prefill" else "black"
                axes.text((start + end) / 2, slot, name, ha="center", va="center", fontsize=8, color=ink)
    legend: list[Patch | Line2D] = [Patch(color=_GREY["prefill"], label="prompt")]
    legend.append(Patch(color=_GREY["decode"], label="answer"))
    crosses = [(edge(i), who[0]) for i, step in enumerate(steps) for who in step.preempted]
    if crosses:
        axes.plot(*zip(*crosses, strict=True), "x", color="black", markersize=6, clip_on=False)
        legend.append(Line2D([], [], marker="x", linestyle="", color="black", label="sent back to the queue"))
    axes.legend(handles=legend, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=9)
    axes.set_title("requests in slots, a colour each", loc="left", fontsize=10)
