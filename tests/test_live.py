"""The live page: its events, its key, and a request that is seen in a browser from its arrival to its end."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn
from browser import Browser, why_no_browser
from engines import fake_engine, greedy
from tiny import tiny_model

from minivllm import BatchEngine
from minivllm.aio import AsyncEngine
from minivllm.server.app import create_app
from minivllm.server.gate import OPEN_PATHS, Gate
from minivllm.server.live import _FILES, CACHED, FREE, Follower, take_picture

KEY = "a-key-of-the-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@contextmanager
def server(model, api_key=None, **sizes):
    """Serve a tiny model named "tiny" on a free port."""
    engine = AsyncEngine(BatchEngine(model, device="cpu", **{"num_slots": 4, **sizes}))
    app = create_app(engine, ["tiny"], api_key=api_key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=20))
        app.state.stopping = lambda: running.should_exit
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            base = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield SimpleNamespace(base=base, app=app, running=running, engine=engine.engine, thread=thread)
        finally:
            running.should_exit = True
            thread.join()


# ---------------------------------------------------------------- messages


class Reader:
    """What a browser knows after each message."""

    def __init__(self):
        self.state = {"log": []}
        self.blocks = []

    def take(self, message):
        message = json.loads(json.dumps(message))
        self.state["log"] += message.pop("log", [])
        if changes := message.pop("blocks", None):
            if "size" in changes:
                self.blocks = [FREE] * changes["size"]
            for block, code in zip(changes["at"], changes["to"], strict=True):
                self.blocks[block] = code
        self.state.update(message)


def expected_blocks(engine):
    codes = {"free": FREE, "cached": CACHED}
    return [codes[b.state] if b.state != "owned" else 2 * b.owners[0][0] + (b.refs > 1) for b in engine.blocks]


def test_messages_add_up_to_what_the_engine_holds():
    engine = fake_engine(num_slots=3, block_size=2, num_blocks=24)
    params = [greedy(5 + i, n=1 + i % 2, temperature=1.0) for i in range(6)]
    handles = [engine.submit([1, 2, 3, 4 + i % 2], p) for i, p in enumerate(params)]
    follower, reader = Follower(engine, "a model"), Reader()
    sizes = []
    while not all(h.done for h in handles):
        message = follower.message(take_picture(engine))
        sizes.append(len(json.dumps(message)))
        reader.take(message)
        views = [v for v in engine.slots if v.request_id is not None]
        assert [(s[0], s[1], s[2], s[3]) for s in reader.state["slots"]] == [
            (v.slot, v.request_id, v.sample, v.phase == "decode") for v in views
        ]
        assert [q[:2] for q in reader.state["queue"]] == [[q.request_id, q.sample] for q in engine.queue]
        assert reader.state["stats"]["queued"] == len(engine.queue)
        assert reader.blocks == expected_blocks(engine)
        engine.step()
    reader.take(follower.message(take_picture(engine)))
    assert reader.state["slots"] == [] and reader.blocks == expected_blocks(engine)
    assert any(code >= 0 and code % 2 for code in expected_blocks(engine)) is False  # nothing is owned any more
    came = [entry[3:5] for entry in reader.state["log"] if entry[0] == "in"]
    left = [entry[3:5] for entry in reader.state["log"] if entry[0] == "out"]
    everyone = [[i, sample] for i, p in enumerate(params) for sample in range(p.n)]
    assert sorted(left) == everyone and sorted({tuple(who) for who in came}) == [tuple(who) for who in everyone]
    assert reader.state["engine"]["model"] == "a model" and reader.state["engine"]["num_slots"] == 3
    still = follower.message(take_picture(engine))
    assert set(still) == {"t", "stats"}  # nothing has changed


def test_shared_blocks_have_odd_codes():
    engine = fake_engine(num_slots=2, block_size=2, num_blocks=24)
    handle = engine.submit([1, 2, 3, 4, 5], greedy(4, n=2, temperature=1.0))
    engine.step()
    engine.step()
    codes = take_picture(engine).blocks
    assert sorted(np.unique(codes).tolist()) == [FREE, 0, 1]
    assert (codes == 1).sum() == 2  # the prompt's two full blocks
    handle.cancel()


# ---------------------------------------------------------------- the routes


def first_message(base, **options):
    with httpx.stream("GET", f"{base}/live/events", timeout=30, **options) as response:
        assert response.status_code == 200, response.status_code
        assert response.headers["content-type"].startswith("text/event-stream")
        line = next(response.iter_lines())
        assert line.startswith("data: ")
        return json.loads(line.removeprefix("data: "))


def test_the_page_and_its_events_want_the_key(model):
    assert OPEN_PATHS == ("/health",)
    with server(model, api_key=KEY) as served:
        for path, name in _FILES.items():
            assert httpx.get(served.base + path).status_code == 401, name
            page = httpx.get(served.base + path, auth=("any", KEY))
            assert page.status_code == 200, name
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "http:" not in page.text and "https:" not in page.text, "something is loaded from elsewhere"
            for secret in (KEY, "tiny", str(model), "Llama"):
                assert secret not in page.text
        assert httpx.get(f"{served.base}/live/events").status_code == 401
        assert httpx.get(f"{served.base}/live/events?key={KEY}").status_code == 401  # addresses end up in logs
        for way in ({"headers": {"Authorization": f"Bearer {KEY}"}}, {"auth": ("any", KEY)}):
            assert first_message(served.base, **way)["engine"]["model"] == "tiny"


def test_many_who_watch_cost_one_look_and_nobody_costs_none(model, monkeypatch):
    from minivllm.server import live

    looks = []
    monkeypatch.setattr(live, "take_picture", lambda engine: looks.append(1) or take_picture(engine))
    with server(model) as served:
        time.sleep(0.3)
        assert looks == []
        stop, start = threading.Event(), time.monotonic()

        def watch():
            with httpx.stream("GET", f"{served.base}/live/events", timeout=30) as response:
                for _ in response.iter_lines():
                    if stop.is_set():
                        return

        watchers = [threading.Thread(target=watch) for _ in range(8)]
        for watcher in watchers:
            watcher.start()
        time.sleep(1.0)
        stop.set()
        for watcher in watchers:
            watcher.join()
        assert 1 <= len(looks) <= 2 + 1.2 * (time.monotonic() - start) / live.INTERVAL


def test_an_open_stream_does_not_hold_up_the_end_of_the_server(model):
    with server(model) as served, httpx.stream("GET", f"{served.base}/live/events", timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        served.running.should_exit = True
        start = time.monotonic()
        rest = list(lines)  # it comes to an end by itself
        served.thread.join()
        assert time.monotonic() - start < 15 and len(rest) < 20  # cut off, it would have taken 20 seconds


# ---------------------------------------------------------------- in a browser

browser_test = pytest.mark.skipif(why_no_browser() is not None, reason=f"no browser: {why_no_browser()}")


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


# Sees what the page shows, change by change: which requests stand in the queue, which in a slot, in which phase.
WATCH = """
window.seen = [];
const look = () => {
  const slots = [...document.querySelectorAll('.slot')].map((row) => [row.dataset.request ?? null, row.dataset.phase]);
  const queue = [...document.querySelectorAll('#queue .chip')].map((chip) => chip.dataset.request);
  const now = JSON.stringify({slots, queue});
  if (window.seen.at(-1) !== now) window.seen.push(now);
};
look();
new MutationObserver(look).observe(document.body, {subtree: true, childList: true, attributes: true});
"""
ENDED = "return [...document.querySelectorAll('#log li[data-kind=out]')].map((line) => line.dataset.request)"


def post(served, body):
    answer = httpx.post(f"{served.base}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def slow_down(served, seconds):
    """Make each step take a while, as a large model would."""
    launch = served.engine._runner.launch

    def slower(batch):
        time.sleep(seconds)
        return launch(batch)

    served.engine._runner.launch = slower


def stages_of(seen, name):
    """Return where the page showed a request, in order, without repeats."""
    stages = []
    for shown in map(json.loads, seen):
        stage = next((phase for request, phase in shown["slots"] if request == name), None)
        stage = "queue" if name in shown["queue"] else stage
        if not stages or stages[-1] != stage:
            stages.append(stage)
    return stages


@browser_test
def test_a_request_is_seen_arriving_prefilling_decoding_and_leaving(model, browser):
    with server(model, num_slots=1, max_step_tokens=24) as served:
        slow_down(served, 0.12)
        browser.open(f"{served.base}/live")
        browser.until("return document.querySelector('#state').className === 'live'")
        browser.until("return document.querySelectorAll('.slot').length === 1")
        browser.run(WATCH)
        body = {"prompt": [5] * 200, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        posts = [threading.Thread(target=post, args=(served, body)) for _ in range(2)]
        posts[0].start()
        browser.until("return document.querySelector('.slot').dataset.request === '0'")
        posts[1].start()
        browser.until(f"{ENDED}.length === 2")
        for thread in posts:
            thread.join()
        browser.until("return document.querySelector('.slot').dataset.phase === 'free'")
        seen = browser.run("return window.seen")
        # The second shares the first's prompt: its blocks are cached, and so it is computed at once.
        first, second = stages_of(seen, "0"), stages_of(seen, "1")
        assert first in ([None, "prefill", "decode", None], [None, "queue", "prefill", "decode", None])
        assert second[:2] == [None, "queue"] and second[-2:] == ["decode", None]
        assert browser.run(ENDED) == ["1", "0"]
        numbers = browser.run("return document.querySelector('#numbers').innerText")
        assert "20\ntokens generated" in numbers and "0/1\nslots taken" in numbers
        assert [line for line in browser.log() if "[DOM]" not in line] == []


def with_key(url, key):
    return url.replace("://", f"://any:{key}@")


@browser_test
def test_the_key_in_the_address_shows_the_page(model, browser):
    with server(model, api_key=KEY) as served:
        browser.open(f"{with_key(served.base, KEY)}/live")
        browser.until("return document.querySelector('#state')?.className === 'live'")
        browser.until("return document.querySelectorAll('.slot').length === 4")
        assert browser.run("return document.querySelector('#title').textContent") == "tiny"
        assert browser.run("return getComputedStyle(document.querySelector('main')).display") == "grid"  # styled
        browser.open(f"{served.base}/live")  # the browser has learnt the key
        browser.until("return document.querySelectorAll('.slot').length === 4")


@browser_test
@pytest.mark.parametrize("key", [None, "another"])
def test_without_the_key_a_browser_gets_401(model, browser, key):
    with server(model, api_key=KEY) as served:
        browser.open(f"{served.base if key is None else with_key(served.base, key)}/live")
        status = "return performance.getEntriesByType('navigation')[0].responseStatus"
        assert browser.run(status) == 401
        assert browser.run("return document.querySelector('main')") is None
        assert "tiny" not in browser.run("return document.documentElement.innerHTML")


@browser_test
def test_a_stream_that_wants_another_key_is_told(model, browser, monkeypatch):
    refusal = Gate._refusal

    def other_key(gate, path, headers):
        # Refused as another route would be: asked for Basic, the browser asks its user before it tells the page.
        return refusal(gate, "/v1/models", {}) if path == "/live/events" else refusal(gate, path, headers)

    monkeypatch.setattr(Gate, "_refusal", other_key)
    with server(model, api_key=KEY) as served:
        browser.open(f"{with_key(served.base, KEY)}/live")
        words = "the server wants its key: load the page again"
        browser.until(f"return document.querySelector('#state').textContent === '{words}'")
        assert browser.run("return document.querySelector('#main').hidden")


def darkness(colour):
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 765


@browser_test
@pytest.mark.parametrize(("width", "dark"), [(360, False), (1200, True)])
def test_the_page_fits_a_phone_and_follows_the_dark(model, browser, width, dark):
    with server(model, num_slots=4) as served:
        browser.show(width, 900, dark)
        post(served, {"prompt": [5] * 40, "max_tokens": 4, "n": 2})
        browser.open(f"{served.base}/live")
        browser.until("return document.querySelectorAll('.slot').length === 4")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        cut = "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth)"
        assert browser.run(f"return {cut}.map((e) => e.outerHTML)") == []
        colours = browser.run("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
        assert [darkness(colour) < 0.5 for colour in colours] == [dark, not dark]
        # The block map is painted: it has more than one colour.
        browser.until(
            "const c = document.querySelector('#blocks');"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "return new Set(new Uint32Array(d.buffer)).size > 2"
        )
