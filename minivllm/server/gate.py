"""What stands in front of every route: the key, the host's name, and the bound on bodies."""

from __future__ import annotations

import hmac
import ipaddress
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The live page asks for the key itself; what it shows comes from /live/events, which is not open.
OPEN_PATHS = ("/health", "/live", "/live/live.js", "/live/live.css")


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Json(JSONResponse):
    """JSON of any text, half of a surrogate pair included, which a client may have sent."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return dumps(content)


def dumps(content: Any) -> bytes:
    """Return JSON in UTF-8; what UTF-8 cannot hold is escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine itself."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Gate:
    """Answer 401 without the key, 403 to a foreign host name, 413 to a body that is too long.

    ``local_only`` refuses Host headers that do not name this machine: where there is no key, a web page whose name was
    pointed at 127.0.0.1 could otherwise read answers.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int, local_only: bool) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route takes a WebSocket, and none gets past the key
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Json | None:
        if self._local_only:
            host = headers.get(b"host", b"localhost").decode("latin-1")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if not is_loopback(name):
                text = "This server answers to this machine's own names; an API key opens it to others."
                return Json(error_body(text, "permission_error", code="foreign_host"), 403)
        if self._key is not None and path not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            scheme, _, token = given.partition(b" ")
            # Compared whatever the scheme is, so that the time tells nothing.
            equal = hmac.compare_digest(token.strip(), self._key)
            if not equal or scheme.lower() != b"bearer":
                text = "A valid key is needed: Authorization: Bearer KEY."
                body = error_body(text, "invalid_request_error", code="invalid_api_key")
                return Json(body, 401, {"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return Json(self._too_long(), 413, {"Connection": "close"})
        return None

    def _too_long(self) -> dict[str, Any]:
        text = f"The body is longer than the {self._max_body_bytes} bytes that are taken."
        return error_body(text, "invalid_request_error", code="body_too_long")

    def _bounded(self, receive: Receive) -> Receive:
        """Count what comes: a body sent in pieces need not say how long it is."""
        got = 0

        async def count() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._max_body_bytes:
                raise HTTPException(413, self._too_long()["error"]["message"], {"Connection": "close"})
            return message

        return count
