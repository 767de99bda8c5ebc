"""The routes: OpenAI's completions and chat, models, health and metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from minivllm import __version__
from minivllm.aio import AsyncEngine, AsyncHandle
from minivllm.request import EngineClosedError, Generation, SamplingParams
from minivllm.server.answers import Answer, ChatAnswer, CompletionAnswer, events, fault, internal_error
from minivllm.server.gate import Gate, Json, error_body
from minivllm.server.live import register_live
from minivllm.server.metrics import Metrics
from minivllm.server.protocol import COMPLETION_TOKENS, BadRequestError, Body, ChatBody, CompletionBody
from minivllm.shown import shown

MAX_BODY_BYTES = 8 << 20
MAX_QUEUE = 1024


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Service:
    """Stand between the routes and the engine: names, the bound on the queue, clients that leave."""

    def __init__(self, engine: AsyncEngine, names: Sequence[str], max_queue: int) -> None:
        self.engine, self.names, self.max_queue = engine, list(names), max_queue
        self.metrics = Metrics(engine, self.names[0])
        engine.on_end = self.metrics.observe
        self.created = int(time.time())

    def model(self, name: str | None) -> str:
        """Return the name that an answer carries; an unknown one is answered 404."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            text = f"There is no model {shown(name)} here, only {self.names[0]!r}."
            raise BadRequestError(text, "model", "model_not_found", 404)
        return name

    def card(self) -> dict[str, Any]:
        """Return the model as /v1/models lists it."""
        return {
            "id": self.names[0],
            "object": "model",
            "created": self.created,
            "owned_by": "minivllm",
            "root": self.names[-1],
            "max_model_len": self.engine.engine.sizes.max_seq_len,
        }

    async def submit(
        self, prompts: list[Any], params: SamplingParams, param: str, deltas: bool, most: int | None = None
    ) -> AsyncHandle:
        """Queue prompts, or say what is wrong with them or that the queue is full.

        Where ``params`` has no ``max_tokens``, an answer has at most ``most`` tokens, fewer where there is no room.
        """
        engine, wanted = self.engine.engine, len(prompts) * params.n
        if wanted > self.max_queue + engine.sizes.num_slots:
            room = self.max_queue + engine.sizes.num_slots
            raise BadRequestError(f"{wanted} answers are asked for at once; there is room for {room}", "n")
        ids = await asyncio.to_thread(self._encode, prompts, param)
        limit = engine.sizes.max_seq_len
        longest = max(len(p) for p in ids)
        if longest >= limit:
            text = f"the prompt has {longest} tokens; with the answer at most {limit} are served"
            raise BadRequestError(text, param, "context_length_exceeded")
        if params.max_tokens is not None and longest + params.max_tokens > limit:
            text = f"max_tokens {params.max_tokens} and a prompt of {longest} tokens are more than the {limit} served"
            raise BadRequestError(text, "max_tokens", "context_length_exceeded")
        # From here to the end nothing is awaited: what is counted now holds when the requests are queued.
        if self.engine.num_waiting + wanted - self.engine.num_free_slots > self.max_queue:
            self.metrics.refused()
            raise BadRequestError("The queue is full; try again later.", None, "queue_full", 429)
        try:
            own = params if most is None else [self._bounded(params, len(p), most) for p in ids]
            handle = self.engine.submit(ids, own, deltas=deltas)
        except EngineClosedError:
            raise BadRequestError("The server is shutting down.", None, "cancelled", 503) from None
        except (TypeError, ValueError) as error:
            text = str(error).removeprefix("prompt 0: ") if len(ids) == 1 else str(error)
            named = next((n for n in ("stop_token_ids", "logit_bias", "max_tokens") if n in text), param)
            raise BadRequestError(text, named) from None
        for request, prompt in zip(handle.requests, prompts, strict=True):
            request.prompt = prompt if isinstance(prompt, str) else None
        return handle

    def _bounded(self, params: SamplingParams, prompt_tokens: int, most: int) -> SamplingParams:
        """Return parameters whose answer has at most ``most`` tokens, ``min_tokens`` where those are more."""
        if params.max_tokens is not None:
            return params
        sizes = self.engine.engine.sizes
        room = min(sizes.max_seq_len, sizes.num_blocks * sizes.block_size + 1) - prompt_tokens
        return replace(params, max_tokens=max(min(most, room), params.min_tokens, 1))

    def _encode(self, prompts: list[Any], param: str) -> list[list[int]]:
        """Turn texts into token ids; long ones take a while, so this runs beside the event loop."""
        tokenizer = self.engine.engine.tokenizer
        out: list[list[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                if tokenizer is None:
                    raise BadRequestError("the model has no tokenizer: send token ids", param)
                ids = tokenizer.encode(prompt) if prompt else []
            else:
                ids = prompt
            if not ids:
                raise BadRequestError(f"{param} is empty", param)
            out.append(ids)
        return out

    async def conversation(self, body: ChatBody) -> list[int]:
        """Render a conversation through the model's chat template."""
        tokenizer = self.engine.engine.tokenizer
        if tokenizer is None:
            raise BadRequestError("the model has no tokenizer, so it cannot chat", "messages")
        extra = body.chat_template_kwargs or {}
        try:
            return await asyncio.to_thread(
                tokenizer.apply_chat_template, body.messages, body.add_generation_prompt, **extra
            )
        except (TypeError, ValueError) as error:
            raise BadRequestError(str(error), "messages") from None

    async def respond(self, request: Request, handle: AsyncHandle, answer: Answer, body: Body) -> Response:
        """Stream the answer, or wait for it."""
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            stream = events(handle, answer, body.include_usage)
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        generations = await _result(request, handle)
        for generation in generations:
            reasons = {sample.finish_reason for sample in generation.samples}
            for reason in ("error", "cancelled"):
                if reason in reasons:
                    status, content = fault(answer.id, reason, generation.error)
                    return Json(content, status)
        return Json(answer.whole(generations))


async def _result(request: Request, handle: AsyncHandle) -> list[Generation]:
    """Wait for the answer, and for the client's leaving; whichever comes first."""
    result = asyncio.ensure_future(handle.result())
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientGoneError
        return result.result()
    finally:
        gone.cancel()
        result.cancel()  # with it what has not ended


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(
    engine: AsyncEngine,
    model_names: Sequence[str],
    *,
    api_key: str | None = None,
    max_queue: int = MAX_QUEUE,
    max_body_bytes: int = MAX_BODY_BYTES,
    cors_origins: Sequence[str] = (),
    local_only: bool = False,
) -> FastAPI:
    """Build the application; the engine is closed when it shuts down.

    Parameters
    ----------
    engine : AsyncEngine
        What answers.
    model_names : sequence of str
        Names that requests may call the model by; the first is listed.
    api_key : str, optional
        Wanted in front of every route but /health, as a bearer token or as the password of HTTP Basic.
    max_queue : int
        Samples that may wait for a slot; what comes beyond them is answered 429.
    max_body_bytes : int
        Longest body taken.
    cors_origins : sequence of str
        Origins whose pages may call; none by default.
    local_only : bool
        Refuse Host headers that do not name this machine, and pages of other machines.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    # No pages of documentation: they load scripts from elsewhere. /openapi.json is there.
    app = FastAPI(title="minivllm", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    service = Service(engine, model_names, max_queue)
    app.add_middleware(
        Gate, api_key=api_key, max_body_bytes=max_body_bytes, local_only=local_only, origins=cors_origins
    )
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    _add_errors(app)
    _add_answers(app, service)
    _add_views(app, service)
    register_live(app, engine, service.names[0])
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several."""
        name = service.model(body.model)
        body.refuse()
        params, prompts = body.params(), body.prompts()
        answer = CompletionAnswer(name, params, service.engine.engine.tokenizer)
        answer.echo = bool(body.echo)
        handle = await service.submit(prompts, params, "prompt", bool(body.stream), COMPLETION_TOKENS)
        return await service.respond(request, handle, answer, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        name = service.model(body.model)
        body.refuse()
        params = body.params()
        ids = await service.conversation(body)
        answer = ChatAnswer(name, params, service.engine.engine.tokenizer)
        handle = await service.submit([ids], params, "messages", bool(body.stream))
        return await service.respond(request, handle, answer, body)


def _add_views(app: FastAPI, service: Service) -> None:
    @app.get("/", response_model=None, include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("/live")

    @app.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        """List the model."""
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> dict[str, Any]:
        """Describe the model."""
        service.model(name)
        return service.card()

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Say whether requests are served."""
        alive = service.engine.alive
        return Json({"status": "ok" if alive else "closed"}, 200 if alive else 503)

    @app.get("/metrics", response_model=None)
    def metrics() -> Response:  # not a coroutine: it waits for the running step
        """Count, for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(BadRequestError)
    async def bad_request(request: Request, error: BadRequestError) -> Response:
        kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
        kind = kinds.get(error.status, "invalid_request_error")
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return Json(error_body(str(error), kind, error.param, error.code), error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return Json(_describe(error), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        text = f"There is no {request.url.path} here." if error.status_code == 404 else str(error.detail)
        content = error_body(text, "invalid_request_error", code="body_too_long" if error.status_code == 413 else None)
        return Json(content, error.status_code, error.headers)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return Json(internal_error(f"req-{uuid.uuid4().hex}", f"{type(error).__name__}: {error}"), 500)


def _describe(error: RequestValidationError) -> dict[str, Any]:
    """Say in one sentence what is wrong with a body."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return error_body("The body is not valid JSON.", "invalid_request_error")
    param = where[0] if where else None
    if first["type"] == "extra_forbidden":
        return error_body(f"Unknown field: {'.'.join(where)}", "invalid_request_error", param, "unknown_parameter")
    text = f"{'.'.join(where)}: {first['msg']}" if where else f"The body must be a JSON object: {first['msg']}"
    if not where and first["type"] == "model_attributes_type":
        text = "The body must be a JSON object, sent with Content-Type: application/json."
    return error_body(text, "invalid_request_error", param)
