"""Define the HTTP endpoints: OpenAI's chat completions, completions and models, health, metrics, conversations."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvpass.apps.serving.answers import Answer, TextPiece
from kvpass.apps.serving.schemas import ApiError, ChatFields, CompletionFields, SamplingFields, read_fields, read_object
from kvpass.apps.serving.service import ERROR_TIMEOUT, Service

Handler = Callable[[Service, Request], Awaitable[Response]]

log = logging.getLogger("kvpass.serve")

DISCONNECTED = 499  # the status in the log of a client that closed its connection
METRICS_TIMEOUT = 2.0  # seconds that the metrics wait for the end of a step
READY_POLL_INTERVAL = 0.25  # seconds between two checks that the model is ready


def create_app(service: Service) -> Starlette:
    """Return the application; its lifespan starts and stops the service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    def route(path: str, handler: Handler, method: str = "GET", needs_key: bool = True) -> Route:
        async def endpoint(request: Request) -> Response:
            if needs_key:
                service.check_key(request.headers.get("authorization", ""))
            return await handler(service, request)

        return Route(path, endpoint, methods=[method])

    routes = [
        route("/v1/chat/completions", _chat, "POST"),
        route("/v1/completions", _completions, "POST"),
        route("/v1/models", _models),
        route("/v1/models/{name:path}", _model),
        route("/v1/conversations/{name:path}", _conversation),
        route("/v1/conversations/{name:path}", _delete_conversation, "DELETE"),
        route("/load_model", _load_model, "POST", needs_key=False),
        route("/health", _health, needs_key=False),
        route("/metrics", _metrics, needs_key=False),
    ]
    handlers: dict[Any, Any] = {ApiError: _refused, HTTPException: _http_error, Exception: _failed}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


# -- completions -------------------------------------------------------------------------------------------------------


async def _chat(service: Service, request: Request) -> Response:
    fields = read_fields(await _body(service, request), ChatFields)
    return await _answer(service, request, fields, "chat.completion", "chatcmpl")


async def _completions(service: Service, request: Request) -> Response:
    fields = read_fields(await _body(service, request), CompletionFields)
    return await _answer(service, request, fields, "text_completion", "cmpl")


async def _answer(
    service: Service, request: Request, fields: SamplingFields, object_type: str, prefix: str
) -> Response:
    """Run a request and return its answer, whole or as a stream."""
    service.check_model(fields.model)
    name, owner = f"{prefix}-{secrets.token_hex(12)}", service.owner(request.headers.get("authorization", ""))
    envelope = functools.partial(_envelope, name, object_type, int(time.time()), service.name)
    resources = contextlib.AsyncExitStack()
    answer = await resources.enter_async_context(service.answer(name, fields, owner))
    if fields.stream:
        events = _events(answer, envelope, object_type, fields.stream_options.include_usage)
        return _Stream(events, resources, service.settings.drain + ERROR_TIMEOUT)
    try:
        return await _unless_disconnected(request, _complete(answer, envelope, object_type))
    finally:
        await resources.aclose()


def _envelope(
    name: str, object_type: str, created: int, model: str, chunk: bool, choices: list[Any], **extra: Any
) -> Any:
    """Return a completion or one of its chunks, in OpenAI's form."""
    object_name = f"{object_type}.chunk" if chunk and object_type == "chat.completion" else object_type
    return {"id": name, "object": object_name, "created": created, "model": model, "choices": choices, **extra}


async def _complete(answer: Answer, envelope: Callable[..., Any], object_type: str) -> Response:
    texts, reasons = [""] * len(answer.jobs), [""] * len(answer.jobs)
    async for piece in answer.pieces():
        texts[piece.index] += piece.text
        reasons[piece.index] = piece.reason or ""
    choices = [_choice(object_type, index, text, reasons[index]) for index, text in enumerate(texts)]
    return JSONResponse(envelope(False, choices, usage=answer.usage()))


def _choice(object_type: str, index: int, text: str, reason: str | None, delta: dict[str, Any] | None = None) -> Any:
    """Return one choice, whole, or a change of it if `delta` is given."""
    common = {"index": index, "logprobs": None, "finish_reason": reason}
    if object_type != "chat.completion":
        return {**common, "text": text}
    if delta is not None:
        return {**common, "delta": delta}
    return {**common, "message": {"role": "assistant", "content": text, "refusal": None}}


async def _events(
    answer: Answer, envelope: Callable[..., Any], object_type: str, usage: bool
) -> AsyncIterator[dict[str, str]]:
    """Yield the events of a stream; an error after its beginning is an event too."""
    extra: dict[str, Any] = {"usage": None} if usage else {}
    chat = object_type == "chat.completion"
    if chat:
        first = {"role": "assistant", "content": ""}
        for index in range(len(answer.jobs)):
            yield _event(envelope(True, [_choice(object_type, index, "", None, first)], **extra))
    try:
        async for piece in answer.pieces():
            for change in _changes(piece, chat):
                yield _event(envelope(True, [change], **extra))
    except ApiError as error:
        yield _event(error.body())
        return
    if usage:
        yield _event(envelope(True, [], usage=answer.usage()))
    yield {"data": "[DONE]"}


def _changes(piece: TextPiece, chat: bool) -> list[Any]:
    """Return the changes of a choice for a piece of text; a chat's choice ends with a separate change."""
    if not chat:
        return [_choice("text_completion", piece.index, piece.text, piece.reason)]
    text = [_choice("chat.completion", piece.index, "", None, {"content": piece.text})] if piece.text else []
    end = [_choice("chat.completion", piece.index, "", piece.reason, {})] if piece.reason else []
    return [*text, *end]


def _event(body: Any) -> dict[str, str]:
    return {"data": json.dumps(body, ensure_ascii=False)}


class _Stream(EventSourceResponse):
    """A stream of events that frees its resources when it ends, or when the client has closed the connection."""

    def __init__(
        self, events: AsyncIterator[dict[str, str]], resources: contextlib.AsyncExitStack, grace: float
    ) -> None:
        super().__init__(events, sep="\n", shutdown_grace_period=grace)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)


async def _unless_disconnected(request: Request, answering: Any) -> Response:
    """Return an answer; stop working on it when the client has closed the connection."""
    tasks = [asyncio.ensure_future(answering), asyncio.ensure_future(_disconnection(request))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else Response(status_code=DISCONNECTED)
    finally:
        for task in tasks:
            task.cancel()


async def _disconnection(request: Request) -> Any:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(service: Service, request: Request) -> bytes:
    """Return the body of a request, or raise ApiError if it is larger than the server takes."""
    body, max_bytes = bytearray(), service.settings.largest_body
    try:
        async for received in request.stream():
            body += received
            if len(body) > max_bytes:
                raise ApiError(f"the body is larger than {max_bytes} bytes", 413, code="request_too_large")
    except ClientDisconnect:
        raise ApiError("the connection was closed before the end of the body", DISCONNECTED) from None
    return bytes(body)


# -- the model and conversations ---------------------------------------------------------------------------------------


async def _models(service: Service, _: Request) -> Response:
    return JSONResponse({"object": "list", "data": [service.model_card()]})


async def _model(service: Service, request: Request) -> Response:
    service.check_model(request.path_params["name"])
    return JSONResponse(service.model_card())


async def _load_model(service: Service, request: Request) -> Response:
    """Answer `transformers chat`, which asks for its model before it talks: the server has one, and waits for it."""
    name = read_object(await _body(service, request) or b"{}").get("model")
    service.check_model(name)

    async def events() -> AsyncIterator[dict[str, str]]:
        while not service.engine.ready and service.engine.failure is None:
            await asyncio.sleep(READY_POLL_INTERVAL)
        if (failure := service.engine.failure) is not None:
            yield _event({"status": "error", "model": name, "message": f"the server has failed: {failure}"})
        else:
            yield _event({"status": "ready", "model": name, "cached": True})

    return EventSourceResponse(events(), sep="\n")


async def _conversation(service: Service, request: Request) -> Response:
    name, owner = request.path_params["name"], service.owner(request.headers.get("authorization", ""))
    conversation = service.store.find(name, owner)
    facts = {
        "tokens": conversation.seen + len(conversation.tail),
        "evicted": conversation.evicted,
        "in_memory": conversation.cache is not None,
    }
    return JSONResponse({"id": name, "object": "conversation", "metadata": {}, **facts})


async def _delete_conversation(service: Service, request: Request) -> Response:
    name, owner = request.path_params["name"], service.owner(request.headers.get("authorization", ""))
    await service.store.delete(name, owner)
    return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})


# -- the server --------------------------------------------------------------------------------------------------------


async def _health(service: Service, _: Request) -> Response:
    status = service.status()
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


async def _metrics(service: Service, _: Request) -> Response:
    with contextlib.suppress(asyncio.TimeoutError):  # in the middle of a long step the last value is reported
        cached = await asyncio.wait_for(service.engine.cached_tokens(), METRICS_TIMEOUT)
        service.metrics.cached_tokens.set(cached)
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error.body(), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    code = "not_found" if error.status_code == 404 else "method_not_allowed" if error.status_code == 405 else None
    refusal = ApiError(messages.get(error.status_code, str(error.detail)), error.status_code, code=code)
    return JSONResponse(refusal.body(), error.status_code, error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    log.error("a request has failed", exc_info=error)
    refusal = ApiError("the server has failed to answer this request", 500, "server_error")
    return JSONResponse(refusal.body(), 500)
