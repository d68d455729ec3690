from __future__ import annotations

import pytest
from fastapi import APIRouter
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Host, Mount, Route, WebSocketRoute

from server.api.app import ROUTERS
from server.api.auth import OPEN, ROUTES, RouteTable, UndeclaredRoute
from tests.server.harness import Running

NOWHERE = Starlette()
ONE = {"/a/{b}": frozenset({"read"}), "/m": OPEN}


@pytest.fixture(scope="module")
def table() -> RouteTable:
    sockets = [WebSocketRoute(path, NOWHERE) for path in ("/v1/stream", "/v1/responses")]
    routed = [route for router in ROUTERS for route in router.routes]
    return RouteTable([*routed, *sockets, Mount("/static", NOWHERE)])


@pytest.mark.parametrize(
    "route",
    [
        Route("/new", NOWHERE),
        WebSocketRoute("/new", NOWHERE),
        Mount("/new", NOWHERE),
        Mount("", NOWHERE),
        Host("elsewhere", NOWHERE),
    ],
)
def test_route_without_a_scope_does_not_start(route: BaseRoute) -> None:
    with pytest.raises(UndeclaredRoute):
        RouteTable([route])


def test_included_router_does_not_start() -> None:
    router, outer = APIRouter(), APIRouter()
    router.add_api_route("/v1/score", lambda: None)
    outer.include_router(router)
    with pytest.raises(UndeclaredRoute):
        RouteTable(outer.routes)


async def test_app_has_the_routes_of_the_routers_themselves(server: Running) -> None:
    """Routes that each app builds again take its first requests a sixth of a second."""
    routed = [route for router in ROUTERS for route in router.routes]
    assert {*map(id, routed)} <= {*map(id, server.server.config.app.routes)}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "path", "scope"),
    [
        ("http", "/v1/completions", "generate"),
        ("websocket", "/v1/stream", "generate"),
        ("http", "/v1/sessions", "sessions"),
        ("http", "/v1/sessions/sess_1/append", "sessions"),
        ("http", "/v1/sessions/sess_1/export", "sessions"),
        ("http", "/v1/models", "read"),
        ("http", "/metrics", "metrics"),
        ("http", "/metrics", "admin"),
        ("http", "/v1/admin/tenants", "admin"),
    ],
)
def test_path_wants_its_scope(table: RouteTable, kind: str, path: str, scope: str) -> None:
    (wanted,) = table.scopes_of(kind, path)
    assert scope in wanted
    assert wanted <= {scope, "metrics", "admin"}


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *(
            ("http", path)
            for path in ("/v1/administrators", "/v1/sessionsx", "/metricsx", "/v2", "")
        ),
        *(("http", path) for path in ("/v1/completions\n", "/metrics\n", "/v1/completions/")),
        *(("http", path) for path in ("/v1/stream", "/static", "/v1/admin/", "//")),
        *(("websocket", path) for path in ("/", "/health", "/static/x", "/v1/completions")),
    ],
)
def test_path_of_no_route_has_no_row(table: RouteTable, kind: str, path: str) -> None:
    assert table.scopes_of(kind, path) == []


def test_where_two_routes_have_a_path_both_count() -> None:
    routes = [Route("/a/{b}", NOWHERE), Route("/a/c", NOWHERE)]
    declared = {"/a/{b}": frozenset({"read"}), "/a/c": frozenset({"admin"})}
    table = RouteTable(routes, declared)  # type: ignore[arg-type]
    assert table.scopes_of("http", "/a/c") == [{"read"}, {"admin"}]


def test_only_pages_and_probes_are_open() -> None:
    found = {path for path, scopes in ROUTES.items() if scopes == OPEN}
    assert found == {"/", "/health", "/ready", "/chat", "/static"}


def test_no_row_is_for_a_route_that_is_gone() -> None:
    known = {getattr(route, "path", None) for router in ROUTERS for route in router.routes}
    others = {"/v1/stream", "/v1/responses", "/static", "/openapi.json"}
    assert ROUTES.keys() - known - others == set()
