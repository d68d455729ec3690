"""Schemas as generators write them: pydantic's, zod's, OpenAPI 3.0's."""

from __future__ import annotations

import contextlib
import datetime
import json
import uuid
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, Json, TypeAdapter

from server.constraints.schema import NULL, Exclusive, FormatRefused, normal
from tests.server.constraints.drawing import accepts, check, compiled, of_schema

pytestmark = pytest.mark.slow

Schema = dict[str, Any]


class Colour(Enum):
    RED, BLUE = "red", "blue"


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat"]
    lives: int = Field(9, ge=0, le=9)


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog"] = "dog"
    name: str | None = Field(None, max_length=8, examples=["Rex"])


class Owner(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"x-internal": True})
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    colours: dict[Colour, int]
    when: datetime.datetime
    id: uuid.UUID


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: int
    children: Annotated[list[Tree], Field(max_length=2)]


class Kinds(BaseModel):
    model_config = ConfigDict(extra="forbid")
    day: datetime.date | None
    span: datetime.timedelta
    price: Decimal
    blob: bytes = Field(max_length=8)
    path: Annotated[str, Field(max_length=8, json_schema_extra={"format": "file-path"})]
    parsed: Json[Any]
    pair: tuple[int, bool]
    either: int | Literal["all"] | None = Field(deprecated=True)
    names: Annotated[dict[str, bool], Field(max_length=1)]


MODELS: list[Any] = [
    Cat,
    Dog,
    Owner,
    Tree,
    Kinds,
    Annotated[Cat | Dog, Field(discriminator="kind")],
]


def closed(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


#: What zod-to-json-schema and OpenAPI 3.0 write.
BY_OTHERS: list[Schema] = [
    {
        "$ref": "#/definitions/shape",
        "definitions": {
            "shape": {
                "oneOf": [
                    closed(type={"type": "string", "const": "circle"}, r={"type": "number"}),
                    closed(type={"type": "string", "const": "square"}, a={"type": "number"}),
                ]
            }
        },
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": closed(n={"const": 1})}},
    {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": closed(a={"type": "null"}), "b": closed(b={"type": "null"})},
    },
    {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "null"},
    },
    {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "null"},
    },
    closed(
        url={
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {},
            "maxLength": 9,
        }
    ),
    closed(one={"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 1}),
    closed(
        a={"type": "integer", "format": "int64", "example": 3, "x-order": 1},
        b={"type": "string", "format": "password", "maxLength": 5},
    ),
]

#: ``nullable`` means nothing to JSON schema; these are the same without it.
NULLABLE: list[tuple[Schema, Schema]] = [
    ({"type": "boolean", "nullable": True}, {"type": ["boolean", "null"]}),
    ({"type": "boolean", "nullable": False}, {"type": "boolean"}),
    ({"enum": ["a"], "type": "string", "nullable": True}, {"enum": ["a", None]}),
    (
        {"allOf": [{"$ref": "#/$defs/a"}], "nullable": True, "$defs": {"a": {"const": 1}}},
        {"enum": [1, None]},
    ),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_text_of_a_pydantic_model_is_one_of_it(model: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    schema = adapter.json_schema()
    for text in check(schema):
        if model not in (Owner, Kinds):  # Python has no year 0, and no leap second
            adapter.validate_json(text)


@pytest.mark.parametrize("schema", BY_OTHERS, ids=lambda schema: json.dumps(schema)[:60])
def test_text_of_another_generators_schema_is_valid(schema: Schema) -> None:
    check(schema)


@pytest.mark.parametrize(("schema", "means"), NULLABLE)
def test_nullable_is_null_as_well(schema: Schema, means: Schema) -> None:
    texts = check(schema, *range(8), means=means)
    assert ("null" in texts) is schema["nullable"]


def test_int32_is_a_bound() -> None:
    grammar = compiled(of_schema({"type": "integer", "format": "int32"}))
    assert accepts(grammar, str(2**31 - 1))
    assert not accepts(grammar, str(2**31))


def test_discriminator_is_always_there() -> None:
    """Without it a dog, whose kind has a default, might be a cat as well."""
    schema = TypeAdapter(MODELS[-1]).json_schema()
    grammar = compiled(of_schema(schema))
    assert accepts(grammar, '{"kind":"dog"}')
    assert not accepts(grammar, "{}")


@pytest.mark.parametrize(
    ("one", "other", "exclusive"),
    [
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": "integer"}, {"type": "string"}, True),
        ({"const": 1}, {"const": True}, True),
        ({"const": 1}, {"const": 1.0}, False),
        ({"enum": ["a", "b"]}, {"enum": ["b"]}, False),
        ({"type": "string", "nullable": True}, {"type": "integer", "nullable": True}, False),
        ({"type": "string", "nullable": True}, {"type": "integer"}, True),
        (closed(a={"const": 1}), closed(a={"const": 2}), True),
        (closed(a={"const": 1}), {"properties": {"a": {"const": 2}}, "required": ["a"]}, False),
        ({"type": "object", "properties": {"a": {"const": 1}}}, closed(a={"const": 2}), False),
        (closed(a={}), closed(b={}), True),
        (closed(a={}), {"type": "object"}, False),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, {"type": "integer"}, True),
        ({"anyOf": [{"type": "null"}, {}]}, {"type": "integer"}, False),
        ({"$ref": "#/$defs/a"}, {"type": "string"}, False),
        (True, {"type": "string"}, False),
        (False, True, True),
    ],
)
def test_only_what_is_certain_is_exclusive(one: Any, other: Any, exclusive: bool) -> None:
    assert Exclusive({}).excludes(one, other) is exclusive
    assert Exclusive({}).excludes(other, one) is exclusive


def test_arguments_of_a_tool_are_closed_unless_it_says_otherwise() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "null"}}}
    whole = {**inner, "properties": {"b": inner, "c": {**inner, "additionalProperties": True}}}
    found = normal(whole, closed=True)
    assert found["additionalProperties"] == {"enum": []}
    assert found["properties"]["b"]["additionalProperties"] == {"enum": []}
    assert found["properties"]["c"]["additionalProperties"] != {"enum": []}
    assert normal({"type": "object"}, closed=True)["additionalProperties"] != {"enum": []}
    assert normal({"allOf": [inner]}, closed=True)["allOf"][0]["additionalProperties"] != {
        "enum": []
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"properties": 5}, NULL], "discriminator": {"propertyName": "a"}},
        {
            "oneOf": [{"properties": {"a": {}}, "required": 5}, NULL],
            "discriminator": {"propertyName": "a"},
        },
        {"type": "object", "propertyNames": {"enum": 5}},
        {"nullable": True, "enum": 5},
    ],
)
def test_malformed_keyword_is_left_for_the_compiler_to_name(schema: Schema) -> None:
    with contextlib.suppress(FormatRefused):
        normal(schema)


def test_nested_alternatives_are_compared_up_to_a_bound() -> None:
    """With 60 references to itself it would be 60 to the eighth power of pairs."""
    root = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 60}}}
    assert not Exclusive(root).excludes({"$ref": "#/$defs/a"}, NULL)
