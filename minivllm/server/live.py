"""The live page: what the engine holds, sent to browsers as it changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.responses import FileResponse, Response, StreamingResponse

from minivllm.aio import AsyncEngine
from minivllm.engine import BatchEngine
from minivllm.timeline import Step
from minivllm.views import Snapshot

Int64Array = np.ndarray[Any, np.dtype[np.int64]]

INTERVAL = 0.2  # seconds between two pictures
FREE, CACHED = -1, -2  # codes of blocks that nobody owns; others are 2 * request, + 1 where shared
MAX_QUEUE_SHOWN = 200
MAX_LOG = 200  # changes of slots in one picture

_STATIC = Path(__file__).parent.parent / "static"
_FILES = {"/live": "live.html", "/live/live.js": "live.js", "/live/live.css": "live.css"}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# The page loads from this server alone, and no other may frame it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Picture:
    """Hold one look at the engine, shared by all who watch; ``taken`` in seconds."""

    taken: float
    snapshot: Snapshot
    blocks: Int64Array  # [num_blocks], codes
    steps: list[Step]


def block_codes(snapshot: Snapshot) -> Int64Array:
    """Return a code for each block: FREE, CACHED, or 2 * the first owner, + 1 where it is shared."""
    refs = np.asarray(snapshot.refs, np.int64)
    codes = np.full(len(refs), FREE, np.int64)
    codes[snapshot.cached] = CACHED
    for view in reversed(snapshot.slots):
        if view.request_id is not None:
            codes[list(view.blocks)] = 2 * view.request_id
    return codes + (refs > 1)


def take_picture(engine: BatchEngine) -> Picture:
    """Look at the engine between two steps; waits for the one that runs."""
    with engine._lock.held():
        snapshot, steps = engine.snapshot(), list(engine.timeline)
    return Picture(time.perf_counter(), snapshot, block_codes(snapshot), steps)


class Follower:
    """Turn pictures into messages for one browser: all at first, then what changed."""

    def __init__(self, engine: BatchEngine, model: str) -> None:
        sizes, config = engine.sizes, engine.config
        self._about: dict[str, Any] | None = {
            "model": model,
            "architecture": config.architecture,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device),
            "num_slots": sizes.num_slots,
            "block_size": sizes.block_size,
        }
        self._blocks: Int64Array = np.zeros(0, np.int64)
        self._sent: dict[str, Any] = {}
        self._next_step = -1

    def message(self, picture: Picture) -> dict[str, Any]:
        """Return what the browser does not know yet."""
        snapshot = picture.snapshot
        message: dict[str, Any] = {"t": round(picture.taken, 3), "stats": asdict(snapshot.stats)}
        if self._about is not None:
            message["engine"], self._about = self._about, None
        now = {
            "slots": [
                [
                    v.slot,
                    v.request_id,
                    v.sample,
                    int(v.phase == "decode"),
                    v.prompt_tokens,
                    v.num_tokens,
                    v.num_computed,
                    v.limit,
                    len(v.blocks),
                ]
                for v in snapshot.slots
                if v.request_id is not None
            ],
            "queue": [
                [q.request_id, q.sample, q.prompt_tokens, q.preemptions] for q in snapshot.queue[:MAX_QUEUE_SHOWN]
            ],
        }
        length = snapshot.stats.queued
        if self._sent.get("length") != length:
            message["queue"] = now["queue"]
        message |= {name: value for name, value in now.items() if self._sent.get(name) != value}
        self._sent = {**now, "length": length}
        if blocks := self._changed_blocks(picture.blocks):
            message["blocks"] = blocks
        if log := self._log(picture.steps):
            message["log"] = log
        return message

    def _changed_blocks(self, codes: Int64Array) -> dict[str, Any]:
        out: dict[str, Any] = {}
        before = self._blocks
        if len(before) != len(codes):
            out["size"] = len(codes)
            before = np.full(len(codes), FREE, np.int64)
        at = np.flatnonzero(before != codes)
        self._blocks = codes
        return {**out, "at": at.tolist(), "to": codes[at].tolist()} if len(at) or out else {}

    def _log(self, steps: list[Step]) -> list[list[Any]]:
        """Return who took and left slots in the steps that the browser has not heard of."""
        first = self._next_step < 0
        new = [step for step in steps if step.step >= self._next_step]
        if new:
            self._next_step = new[-1].step + 1
        elif first:
            self._next_step = 0
        log: list[list[Any]] = []
        for step in new:
            log += [["back", step.step, *who] for who in step.preempted]
            log += [["in", step.step, *who] for who in step.admitted]
            log += [["out", step.step, *who] for who in step.ended]
        return log[-MAX_LOG:]


class Live:
    """Look at the engine a few times a second, however many watch and not at all where nobody does."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine, self._model = engine, model
        self._picture: Picture | None = None
        self._looking = asyncio.Lock()

    async def picture(self) -> Picture:
        """Return a picture no older than the interval; only one at a time is taken, beside the event loop."""
        async with self._looking:
            # A little less than the interval: who comes again after it finds a new one.
            if self._picture is None or time.perf_counter() - self._picture.taken >= 0.9 * INTERVAL:
                self._picture = await asyncio.to_thread(take_picture, self._engine.engine)
            return self._picture

    async def events(self, stopping: Callable[[], bool]) -> AsyncIterator[str]:
        """Send messages as server-sent events until the engine is closed or the server stops."""
        follower = Follower(self._engine.engine, self._model)
        while self._engine.alive and not stopping():
            message = follower.message(await self.picture())
            yield f"data: {json.dumps(message, separators=(',', ':'))}\n\n"
            await asyncio.sleep(INTERVAL)


def register_live(app: FastAPI, engine: AsyncEngine, model: str) -> None:
    """Add /live, its two files and /live/events.

    Parameters
    ----------
    app : FastAPI
        ``app.state.stopping``, where it is set, is asked whether the server is about to stop: an open stream would
        otherwise hold it up.
    engine : AsyncEngine
    model : str
        The name shown; sent with the events alone.
    """
    live = Live(engine, model)

    def add_file(path: str, name: str) -> None:
        @app.get(path, response_model=None, include_in_schema=False)
        async def page_file() -> Response:
            file = _STATIC / name
            return FileResponse(file, media_type=_TYPES[file.suffix], headers=_HEADERS)

    for path, name in _FILES.items():
        add_file(path, name)

    @app.get("/live/events", response_model=None)
    async def live_events() -> Response:
        """Stream slots, queue, blocks and counters as they change."""
        stopping = getattr(app.state, "stopping", lambda: False)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(live.events(stopping), media_type="text/event-stream", headers=headers)
