"""The timeline: the history of four prompts in two slots, what it costs, its plot and its trace."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from engines import fake_engine, greedy, tiny_engine
from test_scheduler_history import ANSWERS, PROMPTS

from minivllm.timeline import Timeline, end_of, seconds_of, spans_of

# Prompts of 17, 14, 13 and 14 tokens that may draw 6, 4, 5 and 3, through two slots, blocks of 4 tokens, 12 of them.
# Written by hand: for each step its rows (slot, request, phase, tokens), then the queue and the free blocks left,
# blocks taken and given back, who took a slot, who left one.
P, D = "prefill", "decode"
HISTORY = [
    ([(0, 0, P, 17), (1, 1, P, 14)], 2, 3, 9, 0, [(0, 0), (1, 1)], []),
    ([(0, 0, D, 1), (1, 1, D, 1)], 2, 3, 0, 0, [], []),
    ([(0, 0, D, 1), (1, 1, D, 1)], 2, 3, 0, 0, [], []),
    # Request 1 takes a block for its seventeenth token, draws its last and leaves all five.
    ([(0, 0, D, 1), (1, 1, D, 1)], 2, 7, 1, 5, [], [(1, 1, "length")]),
    # Request 2 comes, with four blocks; request 0 takes its sixth.
    ([(0, 0, D, 1), (1, 2, P, 13)], 1, 2, 5, 0, [(1, 2)], []),
    ([(0, 0, D, 1), (1, 2, D, 1)], 1, 8, 0, 6, [], [(0, 0, "length")]),
    ([(1, 2, D, 1), (0, 3, P, 14)], 0, 4, 4, 0, [(0, 3)], []),
    ([(0, 3, D, 1), (1, 2, D, 1)], 0, 4, 0, 0, [], []),
    # The last two leave together; request 2 had taken a fifth block.
    ([(0, 3, D, 1), (1, 2, D, 1)], 0, 12, 1, 9, [], [(0, 3, "length"), (1, 2, "length")]),
]


def four_in_two():
    engine = fake_engine(
        num_slots=2, block_size=4, num_blocks=12, max_seq_len=32, max_step_tokens=64, prefix_caching=False
    )
    engine.generate(PROMPTS, [greedy(n) for n in ANSWERS])
    return engine


def test_the_history_of_four_prompts_in_two_slots():
    timeline = four_in_two().timeline
    assert len(timeline) == len(HISTORY)
    for number, (step, expected) in enumerate(zip(timeline, HISTORY, strict=True)):
        rows, queued, free, taken, given, admitted, ended = expected
        assert step.step == number
        assert [(r.slot, r.request_id, r.phase, r.num_tokens) for r in step.rows] == rows, f"step {number}"
        assert (step.queued, step.free_blocks) == (queued, free), f"step {number}"
        assert (step.blocks_taken, step.blocks_given) == (taken, given), f"step {number}"
        assert [who[:2] for who in step.admitted] == admitted, f"step {number}"
        assert sorted((slot, request, why) for slot, request, _, why in step.ended) == ended, f"step {number}"
        assert step.preempted == [] and step.cached_tokens == 0
        assert step.host_time > 0 and step.device_time is not None


def test_times_follow_each_other():
    steps = list(four_in_two().timeline)
    assert all(a.start + a.host_time <= b.start for a, b in pairwise(steps))
    assert all(0 <= step.device_time <= step.host_time for step in steps)


def test_the_device_is_not_busy_for_longer_than_the_call_took(engine):
    begun = time.perf_counter()
    engine.generate([[5, 6, 7], [8, 9]], greedy(60))
    took = time.perf_counter() - begun
    launched = [step for step in engine.timeline if step.rows]  # not one that only learned of an end
    assert len(launched) >= 60
    assert all(step.device_time > 0 for step in launched)
    assert sum(step.device_time for step in launched) <= took


def test_the_data_is_plain():
    dicts = four_in_two().timeline.to_dicts()
    assert json.loads(json.dumps(dicts))[0]["rows"][0] == {
        "slot": 0,
        "request_id": 0,
        "sample": 0,
        "phase": "prefill",
        "num_tokens": 17,
    }


def test_spans():
    spans = four_in_two().timeline.spans()
    assert [(s.slot, s.request_id, s.phase, s.start, s.end) for s in sorted(spans)] == [
        (0, 0, D, 1, 6),
        (0, 0, P, 0, 1),
        (0, 3, D, 7, 9),
        (0, 3, P, 6, 7),
        (1, 1, D, 1, 4),
        (1, 1, P, 0, 1),
        (1, 2, D, 5, 9),
        (1, 2, P, 4, 5),
    ]


def test_a_slot_that_is_left_is_not_held_until_the_next_step():
    engine = fake_engine()
    engine.generate([1, 2, 3], greedy(2))
    time.sleep(0.05)
    engine.submit([1, 2, 3], greedy(2))
    engine.step()
    time.sleep(0.05)  # held all the while
    engine.step()
    steps = list(engine.timeline)
    bounds = {(s.request_id, s.phase): seconds_of(steps, s) for s in spans_of(steps)}
    assert bounds[0, "decode"][1] == end_of(steps, 1) < steps[2].start - 0.04
    assert bounds[1, "prefill"][1] == bounds[1, "decode"][0] == steps[3].start
    assert bounds[1, "prefill"][1] - bounds[1, "prefill"][0] > 0.04


def test_preemptions_and_cache_hits_are_told():
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=4, prefix_caching=False)
    engine.generate([[1, 2, 3], [4, 5, 6]], greedy(5))
    assert [(i, step.preempted) for i, step in enumerate(engine.timeline) if step.preempted] == [(2, [(1, 1, 0)])]
    engine = fake_engine(block_size=2)
    engine.generate([[1, 2, 3, 4, 5]], greedy(1))
    engine.generate([[1, 2, 3, 4, 6]], greedy(1))
    assert [step.cached_tokens for step in engine.timeline] == [0, 4]
    assert [row.num_tokens for step in engine.timeline for row in step.rows] == [5, 1]


def test_off_records_nothing_and_on_again_counts_from_there():
    engine = fake_engine(num_slots=1)
    engine.timeline.enabled = False
    engine.generate([1, 2, 3, 4, 5], greedy(3))
    assert len(engine.timeline) == 0 and engine.timeline.to_dicts() == []
    engine.timeline.enabled = True
    engine.generate([1, 2, 3], greedy(1))
    [step] = engine.timeline
    assert (step.step, step.blocks_taken, step.blocks_given) == (0, 1, 1)
    assert repr(engine.timeline).startswith("<Timeline of 1 steps in 0.")


def test_a_cancel_between_two_steps_is_told_in_the_next():
    engine = fake_engine(num_slots=2)
    handles = [engine.submit([1, 2, 3], greedy(9)) for _ in range(2)]
    engine.step()
    handles[0].cancel()
    engine.step()
    assert engine.timeline[-1].ended == [(0, 0, 0, "cancelled")]
    assert [row.slot for row in engine.timeline[-1].rows] == [1]


def test_a_step_that_an_exception_cut_short_is_kept():
    engine = fake_engine(num_slots=1)

    def fail():
        raise RuntimeError("no")

    engine._runner.model.before = fail
    engine.generate([1, 2, 3], greedy(2), on_error="return")
    engine._runner.model.before = None
    engine.generate([4, 5, 6], greedy(1))
    first, second = engine.timeline
    assert first.admitted == [(0, 0, 0)] and first.ended == [(-1, 0, 0, "error")] and first.rows == []
    assert second.admitted == [(0, 1, 0)] and second.ended == [(0, 1, 0, "length")]


def test_the_oldest_steps_go_first():
    engine = fake_engine(num_slots=1)
    engine.timeline = Timeline(size=4)
    engine.generate([1, 2, 3], greedy(9, stop_token_ids=()))
    steps = engine.timeline
    assert [step.step for step in steps] == list(range(len(steps) + steps[0].step))[-4:]
    steps.clear()
    assert len(steps) == 0


@pytest.mark.parametrize("small", [False, True])
def test_the_trace_is_one_that_perfetto_reads(tmp_path, small):
    engine = fake_engine(num_slots=3, block_size=2, num_blocks=9 if small else 60, prefix_caching=False)
    prompts = [[1 + (i + j) % 12 for j in range(3 + i % 4)] for i in range(8)]
    engine.generate(prompts, greedy(6, n=2, temperature=1.0))
    engine.timeline.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] == "ms"
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {0: "steps", 1: "slot 0", 2: "slot 1", 3: "slot 2"}
    timed = [e for e in events if e["ph"] != "M"]
    assert [e["ph"] for e in events[: len(events) - len(timed)]] == ["M"] * (len(events) - len(timed))
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert {e["ph"] for e in timed} == ({"X", "C", "i"} if small else {"X", "C"})
    for thread in names:
        bars = [e for e in timed if e["ph"] == "X" and e["tid"] == thread]
        assert bars and all(e["dur"] >= 0 for e in bars)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(bars)), names[thread]
    assert sum(e.get("cat") == "step" for e in timed) == len(engine.timeline)
    assert {e["name"] for e in timed if e["ph"] == "C"} == {"queued", "free blocks", "tokens"}
    told = {(e["args"]["request"], e["args"]["sample"]) for e in timed if e.get("cat") == "decode"}
    assert told == {(i, j) for i in range(8) for j in range(2)}


def bars_of(figure):
    return sum(len(c.get_paths()) for c in figure.axes[0].collections)


@pytest.mark.parametrize("x", ["time", "step"])
def test_the_plot_draws_a_bar_a_span(tmp_path, x):
    timeline = four_in_two().timeline
    figure = timeline.plot(x)
    slots, queue, blocks = figure.axes
    assert bars_of(figure) == len(timeline.spans())
    assert slots.get_ylabel() == "slot" and blocks.get_xlabel() == ("seconds" if x == "time" else "step")
    assert [t.get_text() for t in slots.get_legend().get_texts()] == ["prompt", "answer"]
    if x == "step":
        assert sorted(t.get_text() for t in slots.texts) == ["0", "1", "2", "3"]
        assert list(queue.patches[0].get_data().values) == [row[1] for row in HISTORY]
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook asks for
    figure.savefig(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 5_000


def test_the_plot_marks_preemptions_and_takes_an_empty_timeline():
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=4, prefix_caching=False)
    assert bars_of(engine.timeline.plot()) == 0
    engine.generate([[1, 2, 3], [4, 5, 6]], greedy(5))
    slots = engine.timeline.plot("step").axes[0]
    assert [t.get_text() for t in slots.get_legend().get_texts()] == ["prompt", "answer", "sent back to the queue"]
    assert [tuple(p) for p in slots.lines[0].get_xydata()] == [(2.0, 1.0)]
    with pytest.raises(ValueError, match="'time' or 'step'"):
        engine.timeline.plot("slots")


def test_a_full_timeline_of_many_slots_is_drawn_in_a_moment(tmp_path):
    from minivllm.timeline import Step, Work

    timeline = Timeline()
    for i in range(4096):
        if i % 16 == 0:
            d = 0 if i % 64 == 0 else 256
            slots = list(range(256))
            work = Work(slots, [(i // 64 * 256 + slot, 0) for slot in slots], d, [7] * (256 - d))
        timeline._keep(Step(i, i * 0.003, work, 0.002))
    start = time.process_time()
    timeline.plot().savefig(tmp_path / "many.png")
    timeline.save(tmp_path / "many.json")
    assert time.process_time() - start < 20
    assert (tmp_path / "many.json").stat().st_size < 20 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_on_and_off_give_the_same_answers(tiny, device):
    engine = tiny_engine(tiny, device)
    on = [g.token_ids for g in engine.generate(PROMPTS, greedy(8))]
    assert {row.phase for step in engine.timeline for row in step.rows} == {P, D}
    assert all(row.slot >= 0 for step in engine.timeline for row in step.rows)
    engine.timeline.enabled = False
    assert [g.token_ids for g in engine.generate(PROMPTS, greedy(8))] == on
