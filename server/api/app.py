"""Puts the wire together: routes, error shape, middleware, the driver's life."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import WebSocketRoute

from server.api import admin, http, pages, session_routes
from server.api.auth import AuthMiddleware
from server.api.describe import KEY_ERRORS, REF
from server.api.errors import MethodNotAllowed, RouteNotFound, invalid
from server.api.keyring import Keyring
from server.api.limits import BodyLimit, ConnectionLimit
from server.api.model_info import ModelInfo
from server.api.porter import Porter, Signing
from server.api.refuse import error_response
from server.api.schemas import Wire
from server.api.service import Service
from server.api.traced import traced
from server.api.translate import MAX_NAME_CHARS, Limits, TokenizerLike, Translator
from server.api.websocket import StreamEndpoint
from server.api.wellformed import WellFormed
from server.config import ServerConfig
from server.driver import Driver
from server.engine.errors import EngineError, InternalFailure
from server.prefixes import PrefixTier
from server.sessions import Sessions
from server.tracing import OFF, Tracer

ROUTERS = (http.router, session_routes.router, admin.router, pages.router)


def create_app(
    driver: Driver,
    tokenizer: TokenizerLike,
    model: ModelInfo,
    config: ServerConfig,
    version: str,
    signing: Signing,
    tracer: Tracer = OFF,
    prefixes: PrefixTier | None = None,
) -> FastAPI:
    """The ASGI application. Its lifespan starts and stops ``driver``.

    ``app.state.service`` is the `Service` that the routes use and that a drain
    closes the sockets through.
    """
    limits = Limits(config.max_prompt_tokens, config.max_tokens_limit)
    sessions = Sessions(driver, prefixes)
    service = Service(
        driver,
        sessions,
        Porter(sessions, signing.identity, signing.key, config.trust_unsigned_state),
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
    app.state.keyring = Keyring(config.api_keys, config.admin_keys, config.keys_file)
    driver.tenants = app.state.keyring.tenants
    app.state.continue_on_start = config.continue_on_start
    for router in ROUTERS:
        app.include_router(router, responses=KEY_ERRORS if router is admin.router else None)
    app.router.routes.append(WebSocketRoute("/v1/stream", StreamEndpoint(service)))
    app.mount("/static", pages.PageFiles(directory=pages.STATIC))
    _add_error_handlers(app)
    _add_middleware(app, config, model.state_bytes_per_session)
    app.add_middleware(traced, tracer=tracer)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    driver = service.driver
    await driver.start()
    try:
        if app.state.continue_on_start:
            await service.sessions.continue_unfinished()
        yield
    finally:
        await driver.stop()
        service.sessions.close()


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
        if error.status_code == 405 and (methods := _methods_of(request.url.path)):
            response.headers["allow"] = ", ".join(sorted(methods))
        return response

    @app.exception_handler(RequestValidationError)
    async def bad_query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name, message = str(first["loc"][1])[:MAX_NAME_CHARS], first["msg"].lower()
        for theirs in ("input should be ", "value error, must be "):
            message = message.replace(theirs, "must be ")
        return error_response(invalid(name, message))

    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # for nobody: it left before its body was whole

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        return error_response(InternalFailure("the server failed; it has logged why"))


def _methods_of(path: str) -> set[str]:
    """Those of every route with this path; the framework knows only the first one's."""
    routes = (route for router in ROUTERS for route in router.routes)
    return {
        method
        for route in routes
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    }


def _add_middleware(app: FastAPI, config: ServerConfig, state_bytes: int) -> None:
    """The last one added is the first to see a request."""
    # A session's file has its state, and a text that the state may still be owed.
    import_bytes = config.max_body_bytes + state_bytes
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_bytes,
        of_paths={"/v1/sessions/import": import_bytes},
    )
    app.add_middleware(
        AuthMiddleware, keyring=app.state.keyring, allowed_origins=config.allowed_origins
    )
    app.add_middleware(
        ConnectionLimit,
        max_connections=config.max_connections,
        max_per_address=config.max_connections_per_address,
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type"],
        )
    app.add_middleware(WellFormed)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the bodies that the routes parse themselves, and our errors."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(body, "validation") for body in _bodies(document["paths"])],
            ref_template=REF + "{model}",
        )
        schemas = document["components"]["schemas"]
        schemas |= definitions["$defs"]
        for theirs in ("HTTPValidationError", "ValidationError"):
            schemas.pop(theirs, None)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # what that is to FastAPI is a 400 here
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        if app.state.keyring.caller(None) is None:
            document["security"] = [{"key": []}]
        app.openapi_schema = document
    return app.openapi_schema


def _bodies(paths: dict[str, dict[str, Any]]) -> list[type[Wire]]:
    """The models of the bodies that the routes parse themselves: see `body_schema`."""
    known, bodies = {model.__name__: model for model in _kinds(Wire)}, set()
    for operations in paths.values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                bodies.add(content["schema"].get("$ref", "").removeprefix(REF))
    return [known[name] for name in sorted(bodies - {""})]


def _kinds(model: type[Wire]) -> Iterator[type[Wire]]:
    for kind in model.__subclasses__():
        yield kind
        yield from _kinds(kind)
