"""The ASGI application: routes, and what every request passes through.

Invariant: every answer with a status of 400 or more has an error's shape (wire/errors.py), and no exception reaches the
server. The order, from outside: metrics, CORS, keys, routes.

Not responsible for: what a call does (calls.py, responses.py), connections (server.py).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from http_gateway.answers.naming import name_as_sent
from http_gateway.config import GatewayConfig
from http_gateway.engines.engine import Engine, Metadata
from http_gateway.engines.fleet import Fleet
from http_gateway.http.bodies import read_body
from http_gateway.http.calls import Calls
from http_gateway.http.keys import ApiKeys, Keys, forwarded
from http_gateway.http.metrics import CONTENT_TYPE, GatewayMetrics
from http_gateway.http.openapi import document
from http_gateway.http.stream import ClientGone, Events, EventStream, while_connected
from http_gateway.wire.chat import ChatRequest
from http_gateway.wire.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from http_gateway.wire.errors import MESSAGES_PATH, ApiError, shown
from http_gateway.wire.fields import Fields
from http_gateway.wire.messages import CountTokensRequest, MessagesRequest
from http_gateway.wire.responses import ResponsesRequest

DISTRIBUTION = "lockstep-engine"
PAGE = Path(__file__).resolve().parents[1] / "page/index.html"
TRACE_HEADERS = ("traceparent", "tracestate")
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    # The page shows what a model wrote. It may run its own script and ask this server, and fetches nothing else.
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
CREATED_S = 0
"""Models have no date of their own."""

Body = TypeVar("Body", bound=Fields)


class Gateway:
    """The handlers. Made on the event loop."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, own: Metadata) -> None:
        """Args: see below.

        fleet: the engines.
        own: the metadata of calls where clients' keys are not handed on.
        """
        self._config, self._fleet, self._own = config, fleet, own
        self._calls = Calls(fleet)
        self.metrics = GatewayMetrics(fleet, frozenset(path for path, *_ in self._table()))

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [Route(path, handler, methods=[method]) for path, method, handler in self._table()]

    def _table(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        table = [
            ("/v1/chat/completions", "POST", self._posted(ChatRequest, self._calls.chat)),
            ("/v1/completions", "POST", self._posted(CompletionRequest, self._calls.complete)),
            ("/v1/responses", "POST", self._posted(ResponsesRequest, self._calls.respond)),
            (MESSAGES_PATH, "POST", self._posted(MessagesRequest, self._calls.message)),
            (f"{MESSAGES_PATH}/count_tokens", "POST", self._posted(CountTokensRequest, self._calls.count_tokens)),
            ("/tokenize", "POST", self._posted(TokenizeRequest, self._calls.tokenize)),
            ("/detokenize", "POST", self._posted(DetokenizeRequest, self._calls.detokenize)),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{model:path}", "GET", self._model),
            ("/health", "GET", self._health),
            ("/version", "GET", self._version),
            ("/metrics", "GET", self._metrics),
            ("/openapi.json", "GET", self._openapi),
        ]
        return [*table, ("/", "GET", self._page)] if self._config.page else table

    def _posted(
        self, model: type[Body], call: Callable[[Body, Metadata], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that reads a body, runs the call while the client is there, and sends what it returns."""

        async def handle(request: Request) -> Response:
            fields = await read_body(request, model, self._config.max_body_bytes)
            try:
                answer = await while_connected(request.receive, _awaited(call(fields, self._metadata(request))))
            except ApiError as error:
                raise name_as_sent(error, fields) from error.__cause__
            return EventStream(answer) if isinstance(answer, Events) else JSONResponse(answer)

        return handle

    def _metadata(self, request: Request) -> Metadata:
        headers = request.headers
        key = forwarded(headers, request.url.path) if self._config.forwards_keys else self._own
        return [*key, *((name, headers[name]) for name in TRACE_HEADERS if name in headers)]

    async def _models(self, request: Request) -> Response:
        await self._fleet.list_adapters()
        models = [self._described(name) for name in self._fleet.names()]
        adapters = [self._described_adapter(name, engine) for name, engine in self._fleet.adapters().items()]
        return JSONResponse({"object": "list", "data": [*models, *adapters]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name in self._fleet.names():
            return JSONResponse(self._described(name))
        await self._fleet.list_adapters()
        engine = self._fleet.adapters().get(name)
        if engine is None:
            raise self._fleet.unknown(name)
        return JSONResponse(self._described_adapter(name, engine))

    def _described(self, name: str) -> dict[str, Any]:
        info = next(engine.info for engine in self._fleet.engines if name in engine.names)
        assert info is not None, "an engine without a description has no names"
        return {
            "id": name,
            "object": "model",
            "created": CREATED_S,
            "owned_by": "lockstep",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    def _described_adapter(self, name: str, engine: Engine) -> dict[str, Any]:
        parent = engine.names[0]
        return self._described(parent) | {"id": name, "root": engine.adapters[name].path, "parent": parent}

    async def _health(self, request: Request) -> Response:
        if any(engine.serves for engine in self._fleet.engines):
            return JSONResponse({"status": "ok"})
        raise self._fleet.unavailable()

    async def _version(self, request: Request) -> Response:
        engines = {engine.address: engine.info.version for engine in self._fleet.engines if engine.info}
        return JSONResponse({"version": importlib.metadata.version(DISTRIBUTION), "engines": engines})

    async def _metrics(self, request: Request) -> Response:
        return Response(await self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(
            document(
                importlib.metadata.version(DISTRIBUTION),
                keys=bool(self._config.api_key_file or self._config.tenant_file),
            )
        )

    async def _page(self, request: Request) -> Response:
        return FileResponse(PAGE, headers=PAGE_HEADERS)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def application(config: GatewayConfig, gateway: Gateway, keys: Keys | None) -> ASGIApp:
    """Return the whole application."""
    app: ASGIApp = Starlette(
        routes=gateway.routes(),
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _defect},
    )
    if keys is not None:
        app = ApiKeys(app, keys)
    if config.origins:
        app = CORSMiddleware(app, config.origins, allow_methods=["*"], allow_headers=["*"])
    return gateway.metrics.watch(app)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    status, body = shown(request.url.path, error)
    return JSONResponse(body, status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    status, body = shown(request.url.path, ApiError(message, status=error.status_code, code=code))
    return JSONResponse(body, status, error.headers)


async def _defect(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        raise error
    # Starlette raises the error again after this answer, and the server logs it.
    internal = ApiError(
        "a defect of the gateway; its log has the details", status=500, kind="server_error", code="internal"
    )
    return JSONResponse(shown(request.url.path, internal)[1], 500)
