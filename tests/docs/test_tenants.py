"""docs/operate/tenants.md has every limit, and every route under each scope that opens it."""

from __future__ import annotations

import re

from server.api.auth import ALL_SCOPES, ROUTES, Limits
from tests.docs.pages import names, page, rows, section

OPENS = {names(row[0])[0]: row[1] for row in rows(section(page("tenants.md"), "Scopes"))}


def is_named(route: str, text: str) -> bool:
    """By its name, or by that of the folder above it, which ends in a slash there or is said so."""
    folders = re.findall(r"(?:everything|responses, )\s*under `([^`]+)`", text)
    under = any(route.startswith(folder.rstrip("/")) for folder in folders)
    return under or route.partition("/{")[0] in re.findall(r"(/[\w/.-]+)`", text)


def test_table_has_every_scope() -> None:
    assert set(OPENS) == ALL_SCOPES


def test_table_has_every_route_under_its_scopes() -> None:
    for route, scopes in ROUTES.items():
        named = {scope for scope, text in OPENS.items() if is_named(route, text)}
        assert scopes <= named, route


def test_table_has_every_limit() -> None:
    table = [names(row[0])[0] for row in rows(section(page("tenants.md"), "Limits"))]
    assert table == list(Limits.model_fields)
