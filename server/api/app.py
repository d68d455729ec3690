"""Puts the wire together: routes, error shape, middleware, the driver's life."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import WebSocketRoute

from server.api import http, pages
from server.api.auth import AuthMiddleware, Keyring
from server.api.errors import MethodNotAllowed, RouteNotFound
from server.api.limits import BodyLimit, ConnectionLimit
from server.api.model_info import ModelInfo
from server.api.refuse import error_response
from server.api.schemas import AppendBody, CompletionBody, CreateSessionBody
from server.api.service import Service
from server.api.translate import Limits, TokenizerLike, Translator
from server.api.websocket import StreamEndpoint
from server.api.wellformed import WellFormed
from server.config import ServerConfig
from server.driver import Driver
from server.engine.errors import EngineError, InternalFailure


def create_app(
    driver: Driver, tokenizer: TokenizerLike, model: ModelInfo, config: ServerConfig, version: str
) -> FastAPI:
    """The ASGI application. Its lifespan starts and stops ``driver``.

    ``app.state.service`` is the `Service` that the routes use and that a drain
    closes the sockets through.
    """
    limits = Limits(config.max_prompt_tokens, config.max_tokens_limit)
    service = Service(
        driver,
        Translator(tokenizer, limits),
        model,
        outbox_events=config.outbox_events,
        max_socket_requests=config.max_socket_requests,
    )
    app = FastAPI(
        title="Everstream",
        version=version,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(http.router)
    app.include_router(pages.router)
    app.router.routes.append(WebSocketRoute("/v1/stream", StreamEndpoint(service)))
    app.mount("/static", pages.PageFiles(directory=pages.STATIC))
    _add_error_handlers(app)
    _add_middleware(app, config)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    driver: Driver = app.state.service.driver
    await driver.start()
    try:
        yield
    finally:
        await driver.stop()


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves in the one shape."""

    @app.exception_handler(EngineError)
    async def engine_error(request: Request, error: EngineError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        known = MethodNotAllowed() if error.status_code == 405 else RouteNotFound()
        response = error_response(known)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # for nobody: it left before its body was whole

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        return error_response(InternalFailure("the server failed; it has logged why"))


def _add_middleware(app: FastAPI, config: ServerConfig) -> None:
    """The last one added is the first to see a request."""
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(
        AuthMiddleware, keyring=Keyring(config.api_keys), allowed_origins=config.allowed_origins
    )
    app.add_middleware(ConnectionLimit, max_connections=config.max_connections)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type"],
        )
    app.add_middleware(WellFormed)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the bodies that the routes parse themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = (CompletionBody, CreateSessionBody, AppendBody)
        _, definitions = models_json_schema(
            [(body, "validation") for body in bodies],
            ref_template="#/components/schemas/{model}",
        )
        document["components"]["schemas"] |= definitions["$defs"]
        app.openapi_schema = document
    return app.openapi_schema
