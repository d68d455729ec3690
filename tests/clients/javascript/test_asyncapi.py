"""The AsyncAPI document against AsyncAPI's own schema, which npm has."""

from __future__ import annotations

import json

from jsonschema import Draft7Validator

from server.api.stream import document
from tests.clients.javascript.conftest import CLIENT, Node

SPECS = CLIENT / "node_modules" / "@asyncapi" / "specs" / "schemas"


def test_document_is_valid_by_asyncapi_s_own_schema(node: Node) -> None:
    ours = document("0.0.0", "localhost:8000", wants_key=True)
    schema = json.loads((SPECS / "3.0.0-without-$id.json").read_text("utf-8"))
    errors = [error.message[:200] for error in Draft7Validator(schema).iter_errors(ours)]
    assert errors == []
    broken = {**ours, "channels": {"stream": {"addres": "/"}}}
    assert not Draft7Validator(schema).is_valid(broken)
