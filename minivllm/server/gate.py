"""What stands in front of every route: the key, the host's name, and the bound on bodies."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/health",)


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


def given_key(headers: dict[bytes, bytes]) -> bytes | None:
    """Return what a request gives as the key, as a bearer token or as Basic's password; None where it gives none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    token = token.strip()
    if scheme.lower() == b"bearer":
        return token
    # A browser that knows Basic's password adds it by itself, also to what another site's page posts here. Such a
    # request names its Origin, and none of the live page's does; a bearer token is never added that way.
    if scheme.lower() != b"basic" or b"origin" in headers:
        return None
    try:
        _, colon, password = base64.b64decode(token, validate=True).partition(b":")
    except ValueError:
        return None
    return password if colon else None


def is_live(path: str) -> bool:
    """Tell whether a path is the live page's or one of its parts, or leads there."""
    return path in ("/", "/live") or path.startswith("/live/")


class Gate:
    """Answer 401 without the key, 403 to a foreign host name or page, 413 to a body that is too long.

    ``local_only`` refuses Host headers that do not name this machine: where there is no key, a web page whose name was
    pointed at 127.0.0.1 could otherwise read answers. It refuses the pages of other machines too, but for ``origins``:
    a browser lets them send what it does not let them read the answer to.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_body_bytes: int, local_only: bool, origins: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._origins = frozenset(origins)
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
            if not self._may_call(headers.get(b"origin")):
                text = "Pages of this origin may not call: --cors-origin lets them."
                return Json(error_body(text, "permission_error", code="foreign_origin"), 403)
        if self._key is not None and path not in OPEN_PATHS:
            given = given_key(headers)
            equal = hmac.compare_digest(given or b"", self._key)  # in constant time
            if given is None or not equal:
                # A browser that is asked for Basic asks its user, and then sends the key with all that the page loads.
                live = is_live(path)
                text = "A valid key is needed: Authorization: Bearer KEY"
                text += ", or the key as the password of any user." if live else "."
                body = error_body(text, "invalid_request_error", code="invalid_api_key")
                return Json(body, 401, {"WWW-Authenticate": 'Basic realm="minivllm"' if live else "Bearer"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return Json(self._too_long(), 413, {"Connection": "close"})
        return None

    def _may_call(self, origin: bytes | None) -> bool:
        if origin is None:  # no browser, or a page of this server's own
            return True
        text = origin.decode("latin-1")
        if text in self._origins or "*" in self._origins:
            return True
        try:
            return is_loopback(urlsplit(text).hostname or "")
        except ValueError:
            return False

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
