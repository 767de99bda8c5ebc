"""What the engine's views look like as text and as HTML, in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from engines import fake_engine, greedy

from minivllm import html
from minivllm.request import Generation, GenerationStats, Sample
from minivllm.views import BlockList, BlockView, EngineStats, QueueList, SlotList, SlotView


class Checker(HTMLParser):
    """Check that tags nest, and collect texts, tags and styles."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.styles, self.text = [], [], [], ""
        self.feed(source)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))
        self.styles.append(dict(attrs).get("style", ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data + " "


@pytest.fixture(scope="module")
def engine():
    """Return one with two requests in slots, one of them twice, and two in the queue; blocks of all kinds."""
    engine = fake_engine(num_slots=4, block_size=2, num_blocks=70)
    engine.generate([[9, 8, 7, 6, 5, 4]], greedy(1))
    engine.submit([1, 2, 3, 4, 5], greedy(20, n=2, temperature=1.0))
    engine.submit([5, 6, 7], greedy(9))
    for _ in range(3):
        engine.step()
    engine.submit([3, 3], greedy(4, n=2))
    engine.submit([4, 4, 4], greedy(4))
    return engine


def test_slots_print_as_a_table(engine):
    assert str(engine.slots).splitlines() == [
        "slot  request  phase   tokens       blocks  cached",
        "   0        1  decode  5 + 3 of 25       4       0",
        "   1      1.1  decode  5 + 2 of 25       3       4",
        "   2        2  decode  3 + 2 of 12       2       0",
        "1 of 4 slots free",
    ]
    assert str(fake_engine(num_slots=2).slots) == "2 of 2 slots free"
    assert isinstance(engine.slots, list) and engine.slots == list(engine.slots)
    reading = SlotView(3, 7, 1, "prefill", 100, 100, 64, 130, (1, 2))
    assert str(SlotList([reading])).splitlines()[1] == "   3      7.1  prefill  64 of 100 computed       2       0"


def test_the_queue_prints_as_a_table(engine):
    assert str(engine.queue).splitlines() == [
        "place  request  prompt  tokens  preempted",
        "    0        3       2       2          0",
        "    1      3.1       2       2          0",
        "    2        4       3       3          0",
    ]
    assert str(QueueList()) == "the queue is empty"


def test_blocks_say_who_owns_them(engine):
    blocks = engine.blocks
    assert len(blocks) == 70 and [b.block for b in blocks] == list(range(70))
    assert {b.block for b in blocks if b.state == "cached"} | {b.block for b in blocks if b.state == "free"} == set(
        engine.free_blocks
    )
    rows = {v.slot: v.blocks for v in engine.slots}
    for block in blocks:
        holders = [v for v in engine.slots if block.block in v.blocks]
        assert block.refs == len(holders)
        assert list(block.owners) == [(v.request_id, v.sample) for v in holders]
    assert [b.block for b in blocks if b.refs > 1] == sorted(set(rows[0]) & set(rows[1])) != []
    lines = str(blocks).splitlines()
    assert [len(line) for line in lines[:2]] == [8 + 64, 8 + 6]
    letters = "".join(line[8:] for line in lines[:2])
    assert all(letters[b] in "#1" for b in rows[0]) and all(letters[b] == "2" for b in rows[2])
    assert letters.count("c") == sum(b.state == "cached" for b in blocks) > 0
    assert letters.count("#") == 2
    assert lines[2].startswith("70 blocks: ")


def test_the_block_table_prints_its_used_rows(engine):
    table = engine.block_table
    lines = str(table).splitlines()
    assert lines[0].split() == ["slot", "0", *(str(b) for b in engine.slots[0].blocks)]
    assert len(lines) == 4 and lines[3] == "4 slots, up to 32 blocks each; 1 rows empty"


def test_the_block_table_is_an_array_and_gives_plain_ones(engine):
    table = engine.block_table
    assert isinstance(table, np.ndarray) and table.dtype == np.int32 and table.shape == (4, 32)
    for plain in (
        table + 1,
        table == -1,
        table[0],
        table[:2],
        table.max(axis=1),
        -table,
        np.where(table < 0, 0, table),
    ):
        assert type(plain) is np.ndarray
    assert (table == -1).sum() == table.size - sum(len(v.blocks) for v in engine.slots)
    assert table.tolist() == np.asarray(table).tolist()
    table += 1  # a copy: the engine's own is untouched
    assert (engine.block_table == np.asarray(table) - 1).all()


def test_stats_print_one_a_line(engine):
    lines = str(engine.stats).splitlines()
    assert len(lines) == len(EngineStats.__dataclass_fields__)
    assert lines[0] == "steps              4"
    assert {len(line) for line in lines} == {len(lines[0])}


def answer(**changes):
    fields = {
        "index": 2,
        "request_id": 12,
        "prompt_token_ids": [1, 2, 3],
        "text": "<b>4</b> & more",
        "token_ids": [4, 5],
        "finish_reason": "stop",
        "prompt": "What is <2> + 2?",
        "samples": [Sample(0, "<b>4</b> & more", [4, 5], "stop")],
        "stats": GenerationStats(ttft=0.0123, decode_tokens_per_s=41.26, cached_tokens=16),
    }
    return Generation(**fields | changes)


def test_an_answer_prints_as_one():
    assert str(answer()) == (
        "request 12: stop, 3 + 2 tokens, first after 0.012 s, 41.3 tokens/s, 16 cached\n<b>4</b> & more"
    )
    assert str(answer(stop_reason="\n")).startswith("request 12: stop at '\\n', 3 + 2")
    two = [Sample(0, "a", [4], "stop"), Sample(1, "b", [5], "length")]
    assert str(answer(samples=two)).splitlines()[1:] == ["[0] a (stop)", "[1] b (length)"]
    assert str(answer(text="", samples=[])).splitlines()[1] == "[4, 5]"  # a model without a tokenizer
    refused = answer(error="too long", finish_reason="error", text="", token_ids=[], request_id=-1)
    assert str(refused) == "prompt 2: error: too long"


def test_html_nests_and_is_escaped():
    source = answer(stop_reason="<i>")._repr_html_()
    page = Checker(source)
    assert "<b>4</b> & more" in page.text and "What is <2> + 2?" in page.text and "'<i>'" in page.text
    assert {tag for tag, _ in page.tags} == {"div"}
    assert "&lt;script&gt;" in Generation(0, [], "", [], "error", error="<script>")._repr_html_()


def test_everything_shows_in_a_notebook(engine):
    sizes = {"slots": 4, "queue": 4, "stats": 16, "block_table": 4}
    for name, rows in sizes.items():
        page = Checker(getattr(engine, name)._repr_html_())
        assert sum(tag == "tr" for tag, _ in page.tags) == rows, name
    page = Checker(engine._repr_html_())
    assert "<BatchEngine Fake on cpu, 3/4 slots" in page.text
    assert sum(tag == "rect" for tag, _ in page.tags) == 70
    engine_closed = fake_engine()
    engine_closed.close()
    assert Checker(engine_closed._repr_html_()).text.strip() == "<BatchEngine, closed>"
    assert engine.block_table.ravel()._repr_html_() is None


def test_bars_are_as_long_as_what_is_done():
    view = SlotView(0, 3, 0, "decode", 40, 61, 60, 80, (1,))
    widths = re.findall(r"width:([\d.]+)%;background:(#\w+)", html.slots_html([view]))
    assert [float(width) for width, _ in widths] == [50.0, 26.25]
    assert [colour for _, colour in widths] == [html.css_of(3, "prefill"), html.css_of(3)]


def test_the_map_marks_shared_and_cached_blocks():
    blocks = [
        BlockView(0),
        BlockView(1, "cached"),
        BlockView(2, "owned", 1, ((4, 0),)),
        BlockView(3, "owned", 2, ((4, 0), (5, 1))),
    ]
    rects = [attrs for tag, attrs in Checker(html.blocks_html(blocks)).tags if tag == "rect"]
    assert [r["fill"] for r in rects] == ["none", "rgba(128,128,128,0.5)", html.css_of(4), html.css_of(4)]
    assert [r["stroke"] for r in rects[2:]] == [html.css_of(4), "currentColor"]
    titles = re.findall("<title>(.*?)</title>", html.blocks_html(blocks))
    assert titles == ["block 0: free", "block 1: cached", "block 2: request 4", "block 3: request 4, 5.1"]


def test_large_pools_and_many_slots_stay_small():
    blocks = BlockList(BlockView(i, "owned", 1, ((i // 999, 0),)) for i in range(33_000))
    source = blocks._repr_html_()
    assert source.count("<rect") <= 2048 and len(source) < 500_000 and "17 blocks a cell" in source
    assert len(str(blocks).splitlines()) == 2048 // 64 + 2
    slots = SlotList(SlotView(i, i, 0, "decode", 5, 9, 8, 20, (i,)) for i in range(256))
    assert "and 192 more" in str(slots) and "and 192 more" in slots._repr_html_()


def test_colours_read_on_light_and_on_dark(engine):
    """No text has a colour of its own, and no box a background that is not of a request or see-through grey."""
    source = engine._repr_html_() + answer()._repr_html_() + engine.stats._repr_html_()
    assert set(re.findall(r"[^-]color:([^;\"]+)", source)) == {"inherit"}
    backgrounds = set(re.findall(r"background:([^;\"]+)", source))
    assert all(b in ("none", "rgba(128,128,128,0.22)") or re.fullmatch("#[0-9a-f]{6}", b) for b in backgrounds)


def test_neighbours_have_colours_far_apart():
    hues = [html.hue_of(i) for i in range(50)]
    assert all(0.2 < abs(a - b) < 0.8 for a, b in pairwise(hues))
    assert html.css_of(0) == html.css_of(0, "decode") != html.css_of(0, "prefill")
