"""From a model and an address to a server that runs until it is told to stop."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from minivllm.aio import AsyncEngine
from minivllm.engine import BatchEngine
from minivllm.server.app import create_app
from minivllm.server.gate import is_loopback

GRACE_SECONDS = 5  # that answers on their way have once the server was told to stop


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket, before the model is loaded; OSError says why it cannot be."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(address[0]), port), family=family, backlog=2048)


def serve(
    make_engine: Callable[[], BatchEngine],
    model_names: list[str],
    *,
    host: str,
    port: int,
    api_key: str | None,
    max_queue: int,
    max_body_bytes: int,
    cors_origins: list[str],
    verbose: bool,
) -> None:
    """Serve until SIGINT or SIGTERM. ValueError for an open address without a key, OSError for one that is taken."""
    if not is_loopback(host) and not api_key:
        raise ValueError(
            f"{host} can be reached from other machines, and that takes a key: --api-key, or MINIVLLM_API_KEY"
        )
    listener = listen(host, port)
    with listener, AsyncEngine(make_engine()) as engine:
        app = create_app(
            engine,
            model_names,
            api_key=api_key,
            max_queue=max_queue,
            max_body_bytes=max_body_bytes,
            cors_origins=cors_origins,
            local_only=not api_key,
        )
        config = uvicorn.Config(
            app,
            log_level="info" if verbose else "warning",
            access_log=verbose,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        server = uvicorn.Server(config)
        app.state.stopping = lambda: server.should_exit  # asked by streams that would not end by themselves
        # uvicorn stops at a signal and then raises it again, for handlers that were there before; these do nothing.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        # torch and the model's objects stay until the end. To go through them, as a full collection does, takes about
        # 0.1 s in which no request gets on. What is garbage already must go first: it would stay too.
        gc.collect()
        gc.freeze()
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        words = f"{model_names[0]} at {address}/v1, to be seen at {address}/live (Ctrl-C stops it)"
        print(words, file=sys.stderr, flush=True)
        server.run(sockets=[listener])
