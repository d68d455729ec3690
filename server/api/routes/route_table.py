"""The scopes of every route of an app, found when the app is built: what declares none is an error.

The middleware asks this table in front of the router. It matches whole paths, with the
patterns of the routes themselves. A path without a route here never gets to the router.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from server.api.auth.scopes import ROUTES, Scope


class UndeclaredRoute(Exception):
    """A route without a row in `server.api.auth.scopes.ROUTES`: our own mistake."""


class RouteTable:
    """Built once, from all routes. Raises `UndeclaredRoute`."""

    def __init__(
        self, routes: Iterable[BaseRoute], declared: Mapping[str, frozenset[Scope]] = ROUTES
    ) -> None:
        self._rows: dict[str, dict[re.Pattern[str], frozenset[Scope]]]
        self._rows = {"http": {}, "websocket": {}}
        for route in routes:
            kind = "websocket" if isinstance(route, WebSocketRoute) else "http"
            if not isinstance(route, Route | WebSocketRoute | Mount) or route.path not in declared:
                raise UndeclaredRoute(f"{kind} route {getattr(route, 'path', route)!r}: no scope")
            self._rows[kind][route.path_regex] = declared[route.path]

    def scopes_of(self, kind: str, path: str) -> list[frozenset[Scope]]:
        """For each template with this path, the scopes of which one opens it; empty without any.

        ``kind`` is "http" or "websocket". Where several templates have the path, all of
        them must be open to a caller.
        """
        rows = self._rows[kind].items()
        return [scopes for pattern, scopes in rows if pattern.fullmatch(path)]
