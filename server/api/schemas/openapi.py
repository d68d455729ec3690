"""The document at `/openapi.json`: FastAPI's, with what the routes parse and write themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.api.schemas.describe import REF
from server.api.schemas.wire import Wire


def openapi(app: FastAPI) -> dict[str, Any]:
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
