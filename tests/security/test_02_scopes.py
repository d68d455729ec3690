"""02: a key opens what its scopes name and nothing else, on every route that the app has.

The routes are the app's own, so that a new one is tested when it is there. Each is asked
with a key of each single scope, as it is and as the variants that a matcher may take for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Mount, Route, WebSocketRoute
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from server.api.auth import ALL_SCOPES, OPEN, ROUTES
from tests.server.harness import Running, running

SCOPES = sorted(ALL_SCOPES)
#: After the path of a route: what a pattern's end, a normaliser or a decoder may overlook.
ENDS = ("%0A", "%0a%0a", "%0D%0A", "%00", "/", "//", "%2F", "%20", "/.", "/x/..", ";a", "%E2%80%A8")
STARTS = ("/", "/.", "//127.0.0.1")


def keys_file(folder: Path) -> Path:
    """A key for each scope, called as the scope is."""
    entry = '[[key]]\nname = "{0}"\nhash = "sha256:{1}"\nscopes = ["{0}"]\n'
    rows = [entry.format(scope, hashlib.sha256(scope.encode()).hexdigest()) for scope in SCOPES]
    path = folder / "keys.toml"
    path.write_text("\n".join(rows))
    path.chmod(0o600)
    return path


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(keys_file=keys_file(tmp_path)) as started:
        yield started


def routes_of(server: Running) -> list[tuple[str, str, frozenset[str]]]:
    """Method, path and scopes of every HTTP route; the scopes are those that are declared."""
    found = []
    for route in server.server.config.app.routes:  # type: ignore[union-attr]
        if isinstance(route, Mount):
            found.append(("GET", route.path + "/page.css", frozenset(ROUTES[route.path])))
        elif isinstance(route, Route):
            path = re.sub(r"\{\w+\}", "x", route.path)
            found += [(m, path, frozenset(ROUTES[route.path])) for m in sorted(route.methods or ())]
    return found


async def ask(server: Running, method: str, path: str, scope: str) -> httpx.Response:
    url = httpx.URL(f"http://127.0.0.1:{server.port}").copy_with(raw_path=path.encode())
    headers = {"authorization": f"Bearer {scope}"}
    return await server.http.request(method, url, headers=headers)


async def test_key_of_one_scope_opens_what_is_declared_for_it(server: Running) -> None:
    routes = routes_of(server)
    assert {path for _, path, _ in routes} >= {"/metrics", "/v1/admin/models/x", "/v1/sessions/x"}
    for method, path, wanted in routes:
        for scope in SCOPES:
            answer = await ask(server, method, path, scope)
            is_bare = method == "HEAD"
            is_refused = answer.status_code == 403 if is_bare else "scope_missing" in answer.text
            assert is_refused == (wanted != OPEN and scope not in wanted), (method, path)


async def test_no_variant_of_a_path_opens_what_the_path_does_not(server: Running) -> None:
    asked = 0
    for method, path, wanted in routes_of(server):
        variants = [path + end for end in ENDS] + [start + path for start in STARTS]
        for scope in sorted(ALL_SCOPES - wanted) if wanted else ():
            for variant in variants:
                answer = await ask(server, method, variant, scope)
                assert answer.status_code in (400, 403, 404), (method, variant, scope)
                asked += 1
    assert asked > 1000


async def test_no_answer_is_a_redirect(server: Running) -> None:
    """It would repeat the Host that the client claims, and turn https into http behind a proxy."""
    for method, path, wanted in routes_of(server):
        scope = min(wanted, default="read")
        for variant in (path + "/", path.rstrip("/") + "//", "/static", "/static/"):
            answer = await ask(server, method, variant, scope)
            assert not answer.is_redirect and "location" not in answer.headers, (method, variant)


async def test_socket_wants_its_scope(server: Running) -> None:
    app_routes = server.server.config.app.routes  # type: ignore[union-attr]
    sockets = [route for route in app_routes if isinstance(route, WebSocketRoute)]
    assert {route.path for route in sockets} == {"/v1/stream", "/v1/responses"}
    for route in sockets:
        for scope in SCOPES:
            for end in ("", *ENDS):
                url = f"ws://127.0.0.1:{server.port}{route.path}{end}"
                headers = {"authorization": f"Bearer {scope}"}
                if not end and scope in ROUTES[route.path]:
                    async with connect(url, additional_headers=headers):
                        continue
                with pytest.raises(InvalidStatus) as refused:
                    async with connect(url, additional_headers=headers):
                        pass
                wanted = (400, 404) if end else (403,)
                assert refused.value.response.status_code in wanted, (url, scope)
