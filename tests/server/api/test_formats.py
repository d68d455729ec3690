"""A format's shape and size, on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from server.api.schemas.requests import MAX_REGEX_CHARS, JsonSchemaFormat, ResponseFormat

FORMAT: TypeAdapter[ResponseFormat] = TypeAdapter(ResponseFormat)


def schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": value, **more}}


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    "value",
    [
        {"type": "text"},
        {"type": "json_object"},
        schema({}),
        schema({"type": "object"}, strict=True, description="what it is for"),
        schema({}, strict=False),
        schema({}, strict=None, description=None),
        schema(nested(64)),
        {"type": "regex", "regex": "a" * MAX_REGEX_CHARS},
        {"type": "grammar", "grammar": 'start: "a"'},
        {"type": "choice", "choices": ["a"]},
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_taken(value: dict[str, Any]) -> None:
    assert FORMAT.validate_json(json.dumps(value)).type == value["type"]


def test_schema_is_not_changed() -> None:
    value = {"b": 1, "a": [1.5, None, "ü"]}
    found = FORMAT.validate_json(json.dumps(schema(value)))
    assert isinstance(found, JsonSchemaFormat)
    assert json.dumps(found.json_schema.schema_) == json.dumps(value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "xml"},
        {"type": "text", "more": 1},
        {"type": "json_object", "schema": {}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        schema({}, name="with space"),
        schema({}, name="x" * 65),
        schema({}, strict="yes"),
        schema({}, other=1),
        schema([]),
        schema(True),
        schema("{}"),
        schema(nested(65)),
        schema({"description": "x" * 65536}),
        schema({"maximum": 10**30}),
        {"type": "regex", "regex": ""},
        {"type": "regex", "regex": "a" * (MAX_REGEX_CHARS + 1)},
        {"type": "regex", "regex": 3},
        {"type": "grammar", "grammar": "a" * 65537},
        {"type": "choice", "choices": []},
        {"type": "choice", "choices": [""]},
        {"type": "choice", "choices": ["a", 3]},
        {"type": "choice", "choices": ["a"] * 1025},
        {"type": "choice", "choices": ["a" * 1025]},
        {"type": "choice", "choices": ["a" * 1000] * 70},
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FORMAT.validate_json(json.dumps(value))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json_is_no_part_of_a_schema(number: str) -> None:
    text = json.dumps(schema({"minimum": 3})).replace("3", number)
    with pytest.raises(ValidationError):
        FORMAT.validate_json(text)
