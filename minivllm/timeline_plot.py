"""The timeline as a matplotlib figure."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minivllm.timeline import Timeline

_GOLDEN = 0.618033988749895


def colour_of(request_id: int, phase: str = "decode") -> tuple[float, float, float]:
    """Return a request's colour: hues far apart for neighbours; the prompt's phase darker than the answer's."""
    hue = (request_id * _GOLDEN) % 1.0
    lightness, saturation = (0.42, 0.65) if phase == "prefill" else (0.68, 0.55)
    return colorsys.hls_to_rgb(hue, lightness, saturation)


def plot(timeline: Timeline) -> Figure:
    """Draw slots down and steps across, prefill and decode in two shades; queue and free blocks below."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plot needs matplotlib: pip install 'minivllm[plot]'") from None

    steps, spans = list(timeline), timeline.spans()
    num_slots = 1 + max((span[0] for span in spans), default=0)
    height = min(1.8 + 0.32 * num_slots, 12.0) + 1.8
    figure = Figure(figsize=(10, height), layout="constrained")
    ratios = [max(height - 1.8, 1.0), 1.0, 1.0]
    bars, queue, blocks = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": ratios})

    for slot, request, _, phase, start, end in spans:
        bars.barh(slot, end - start, left=start, height=0.82, color=colour_of(request, phase), edgecolor="none")
    first: dict[tuple[int, int, int], tuple[float, float]] = {}
    for slot, request, sample, _, start, end in spans:
        begin, _ = first.get((slot, request, sample), (start, end))
        first[slot, request, sample] = (begin, end)
    for (slot, request, sample), (start, end) in first.items():
        if end - start >= max(len(steps) / 60, 1):
            name = f"{request}.{sample}" if sample else str(request)
            bars.text((start + end) / 2, slot, name, ha="center", va="center", fontsize=8)
    bars.set(ylabel="slot", ylim=(num_slots - 0.4, -0.6), title="requests in slots (dark: prompt, light: answer)")
    bars.set_yticks(range(0, num_slots, max(num_slots // 16, 1)))

    edges = range(len(steps) + 1)
    queue.stairs([step.queued for step in steps], edges, color="tab:red")
    queue.set(ylabel="queued", ylim=(0, None))
    blocks.stairs([step.free_blocks for step in steps], edges, color="tab:blue")
    blocks.set(ylabel="free blocks", xlabel="step", ylim=(0, None), xlim=(0, max(len(steps), 1)))
    return figure
