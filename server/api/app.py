"""Puts the wire together: routes, error shape, middleware, the async engine's life."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from server.api import durable_streams, llama_server, stream
from server.api.anthropic import routes as anthropic
from server.api.auth import Authenticator, Keyring, RouteTable
from server.api.connections import DEFAULT_MAX_CONNECTIONS, ConnectionTable, SocketEndpoint, Sockets
from server.api.errors import FAILED, MethodNotAllowed, RouteNotFound
from server.api.gate import (
    AccessLog,
    BodyLimit,
    Cors,
    Forwarded,
    Gate,
    HostCheck,
    TrustedProxies,
    Versioned,
    error_response,
    refuse,
    traced,
)
from server.api.ollama import routes as ollama
from server.api.openai import chat, completions, texts
from server.api.openai.responses import routes as responses
from server.api.routes import models as model_routes
from server.api.routes import server
from server.api.routes import sessions as session_routes
from server.api.routing import Dialect, openapi
from server.api.schemas.wire import MAX_NAME_CHARS
from server.config import ServerConfig
from server.errors import InternalFailure, RequestError, invalid
from server.models.registry import Builder, ModelChanges, Models
from server.observability.tracing import OFF, Tracer

logger = logging.getLogger("everstream.api")

#: The APIs of other servers, next to OpenAI's. A request that none of them owns is not theirs.
DIALECTS: tuple[Dialect, ...] = (anthropic.DIALECT, ollama.DIALECT, llama_server.DIALECT)

ROUTERS = (
    server.router,
    model_routes.router,
    completions.router,
    chat.router,
    responses.router,
    texts.router,
    session_routes.router,
    durable_streams.router,
    server.admin_router,
    model_routes.admin_router,
    server.states_router,
    stream.router,
    server.pages_router,
    *(dialect.router for dialect in DIALECTS),
)


def create_app(
    models: Models,
    config: ServerConfig,
    version: str,
    tracer: Tracer = OFF,
    builder: Builder | None = None,
) -> FastAPI:
    """The ASGI application. Its lifespan starts and stops the models.

    ``builder`` loads models at run time; without it they stay as they are. Behind
    ``app.state`` are `Models` as ``models``, the `Keyring`, the open `Sockets`, the
    `ConnectionTable` as ``connections``, and the `ModelChanges`, or None, as ``changes``.
    Raises `KeysFileError`.
    """
    app = FastAPI(
        title="Everstream",
        version=version,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the Host that the client claims
    )
    app.state.models, app.state.sockets = models, Sockets()
    app.state.keyring = Keyring(config.api_keys, config.admin_keys, config.keys_file)
    proxies = TrustedProxies(config.trusted_proxies)
    app.state.connections = ConnectionTable(
        config.max_connections or DEFAULT_MAX_CONNECTIONS,
        config.max_connections_per_address,
        proxies,
    )
    models.limit(app.state.keyring.tenants)
    app.state.changes = None
    if builder is not None:
        app.state.changes = ModelChanges(models, builder, config.model_dir, config.retire_timeout_s)
    for router in ROUTERS:
        # As they are: including them would build each route again, with the schemas of its answers.
        app.router.routes.extend(router.routes)
    for path, codec in (
        ("/v1/stream", stream.StreamCodec),
        ("/v1/responses", responses.ResponsesCodec),
    ):
        endpoint = SocketEndpoint(models, app.state.sockets, codec)
        app.router.routes.append(WebSocketRoute(path, endpoint))
    app.router.default = _no_route
    app.mount("/static", server.PageFiles(directory=server.STATIC))
    _add_error_handlers(app)
    _add_gate(app, config, models)
    app.add_middleware(traced, tracer=tracer)
    if config.access_log:
        app.add_middleware(AccessLog)
    if config.trusted_proxies:
        app.add_middleware(Forwarded, proxies=proxies)
    app.add_middleware(Versioned)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    models: Models = app.state.models
    changes: ModelChanges | None = app.state.changes
    await models.start()
    try:
        yield
    finally:
        if changes is not None:
            await changes.close()
        await models.stop()


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    """The framework's own refuses a WebSocket with 403 and no body."""
    if scope["type"] == "websocket":
        await refuse(scope, receive, send, RouteNotFound())
    else:
        raise HTTPException(404)


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves in the one shape."""

    @app.exception_handler(RequestError)
    async def engine_error(request: Request, error: RequestError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        known = (
            MethodNotAllowed() if error.status_code == 405 else RouteNotFound.at(request.url.path)
        )
        response = error_response(known, request.scope)
        response.headers.update(error.headers or {})
        if error.status_code == 405 and (methods := _methods_of(request.url.path)):
            response.headers["allow"] = ", ".join(sorted(methods))
        return response

    @app.exception_handler(RequestValidationError)
    async def bad_query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name, message = str(first["loc"][1])[:MAX_NAME_CHARS], first["msg"].lower()
        for theirs in ("input should be ", "value error, must be "):
            message = message.replace(theirs, "must be ")
        return error_response(invalid(name, message), request.scope)

    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # not read: the client left before its body was whole

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        # uvicorn logs the traceback; this says which request it is of.
        logger.error("a request failed", extra={"request_id": request.state.http_request_id})
        return error_response(InternalFailure(FAILED), request.scope)


def _methods_of(path: str) -> set[str]:
    """Those of every route with this path; the framework knows only the first one's."""
    routes = (route for router in ROUTERS for route in router.routes)
    methods = {
        method
        for route in routes
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    }
    return methods | {"HEAD"} if "GET" in methods else methods


def _add_gate(app: FastAPI, config: ServerConfig, models: Models) -> None:
    def import_bytes() -> int:
        """A session's file has its state, and a text that the state may still be unfed."""
        return config.max_body_bytes + models.max_state_bytes

    def state_bytes() -> int:
        """A tuned state may have wider numbers."""
        return config.max_body_bytes + 2 * models.max_state_bytes

    origins, names = config.allowed_origins, (config.host, *config.allowed_hosts)
    of_paths = {"/v1/sessions/import": import_bytes, "/v1/admin/states": state_bytes}
    app.add_middleware(
        Gate,
        hosts=None if config.wants_key else HostCheck(names),  # a rebound name's page has no key
        cors=Cors(origins) if origins else None,
        connections=app.state.connections,
        authenticator=Authenticator(app.state.keyring, RouteTable(app.routes), origins),
        bodies=BodyLimit(config.max_body_bytes, of_paths=of_paths),
        dialects=DIALECTS,
    )
