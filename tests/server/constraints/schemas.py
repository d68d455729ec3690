"""Schemas by hand, one or more for each keyword, and a generator of others."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

POINT: Schema = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "left", "right"],
            "additionalProperties": False,
        }
    },
}
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "no": {"type": ["integer", "null"]}},
            "required": ["street", "no"],
        }
    },
}

BY_HAND: list[Schema] = [
    {},
    {"type": "object"},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "string"},
    {"type": "number"},
    {"type": "integer"},
    {"type": "array"},
    {"type": ["string", "null"]},
    {"type": ["integer", "boolean", "array"]},
    {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "type": "null"},
    {"const": "a"},
    {"const": None},
    {"const": 3.5},
    {"const": {"a": [1, {"b": None}], "ü": '😀\n"\\'}},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "1", None, True, [1], {"a": 1}]},
    {"enum": ["日本", "ελληνικά", "العربية", "\u0000\u001f", "a/b", "\\"]},
    {"enum": [f"value {index}" for index in range(500)]},
    {"type": "string", "minLength": 3},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 2},
    {"type": "string", "minLength": 100},
    {"type": "string", "pattern": "^[a-z]+$"},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
    {"type": "string", "pattern": "@"},
    {"type": "string", "pattern": "^(a|b)*c?$", "maxLength": 6},
    {"type": "string", "pattern": "^\\d{3}-\\w+$"},
    {"type": "string", "pattern": "^[\\u4e00-\\u9fff]{1,4}$"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "duration"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "uri"},
    {"type": "integer", "minimum": 5},
    {"type": "integer", "maximum": -5},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "minimum": 100, "maximum": 1000, "multipleOf": 25},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "multipleOf": 0.5},
    {"minimum": 3},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "minItems": 5},
    {"type": "array", "items": {"const": 1}, "minItems": 60, "maxItems": 60},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": {"type": "null"}},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
    {"type": "array", "items": POINT},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    {"type": "array", "uniqueItems": False, "items": {"type": "null"}},
    POINT,
    TREE,
    PERSON,
    {"type": "array", "items": PERSON["$defs"]["place"], "minItems": 3},
    {"type": "object", "properties": {"a": {"type": "string"}}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    {"type": "object", "minProperties": 1, "maxProperties": 3},
    {"type": "object", "properties": {"a": True}, "required": ["a"], "maxProperties": 2},
    {"type": "object", "patternProperties": {"^n_": {"type": "number"}, "^s_": {"type": "string"}}},
    {
        "type": "object",
        "patternProperties": {"^[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"ключ": {"type": "string"}, "鍵": True, 'a"b': True}},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]},
    {"anyOf": [POINT, {"type": "array", "items": {"type": "number"}}]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^z+$"}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
            for kind in ("circle", "square", "line")
        ]
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    {"type": "string", "anyOf": [{"minLength": 3}, {"const": "x"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "boolean"}}},
    {"$ref": "#/definitions/a", "definitions": {"a": {"enum": [1, 2]}}},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "null"}}},
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    {"type": "array", "items": {"$ref": "#"}},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]},
    {"type": "object", "additionalProperties": {"$ref": "#"}},
    {"type": "integer", "$ref": "#/$defs/even", "$defs": {"even": {"multipleOf": 2}}},
    {
        "type": "object",
        "properties": {f"key{index}": {"type": "integer"} for index in range(40)},
        "required": [f"key{index}" for index in range(0, 40, 2)],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"rows": {"type": "array", "items": PERSON["$defs"]["place"], "minItems": 2}},
        "required": ["rows"],
        "additionalProperties": False,
    },
]


def generated(seed: int) -> Schema:
    """A schema of several keywords, some levels deep; the same for each seed."""
    return _schema(random.Random(seed), depth=3)


def _schema(draw: random.Random, depth: int) -> Schema:  # noqa: C901 - one case a kind
    kinds = ["string", "integer", "number", "enum", "const", "boolean", "null", "types"]
    if depth:
        kinds += ["array", "tuple", "object", "map", "anyOf", "any"] * 2
    match draw.choice(kinds):
        case "string":
            least = draw.randrange(4)
            bounds = {"minLength": least, "maxLength": least + draw.randrange(9)}
            pattern = draw.choice(["^[a-z]*$", "^\\d+$", "^(ab|c)+$", "x", '^[^a-z"]*$'])
            kind = draw.choice([{}, bounds, {"pattern": pattern}])
            return {"type": "string", **kind}
        case "integer" | "number" as kind:
            least = draw.randrange(-1000, 1000)
            bounds = {"minimum": least, "maximum": least + draw.randrange(1, 5000)}
            open = {f"exclusive{key.title()}": value for key, value in bounds.items()}
            step = {"multipleOf": draw.choice([2, 3, 10])}
            return {"type": kind, **draw.choice([{}, bounds, open if kind == "number" else step])}
        case "enum":
            return {"enum": [_value(draw, 2) for _ in range(draw.randrange(1, 6))]}
        case "const":
            return {"const": _value(draw, 2)}
        case "boolean" | "null" as kind:
            return {"type": kind}
        case "types":
            return {"type": draw.sample(["string", "integer", "null", "boolean"], 2)}
        case "array":
            least = draw.randrange(4)
            counts = {"minItems": least, "maxItems": least + draw.randrange(4)}
            items = {"items": _schema(draw, depth - 1)}
            return {"type": "array", **items, **draw.choice([{}, counts])}
        case "tuple":
            first = [_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
            return {"type": "array", "prefixItems": first, "items": draw.random() < 0.3}
        case "object":
            return _object(draw, depth)
        case "map":
            return {"type": "object", "additionalProperties": _schema(draw, depth - 1)}
        case "anyOf":
            return {"anyOf": [_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}
        case _:
            return {}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(
        ["a", "b", "name", "größe", "鍵", 'q"uote', "with space"], draw.randrange(5)
    )
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        **draw.choice([{}, {"additionalProperties": False}]),
    }


def _value(draw: random.Random, depth: int) -> Any:
    simple = [None, True, 0, -7, 2.5, "", "a", "ünï", "line\nbreak", 'q"', "😀"]
    if depth and draw.random() < 0.3:
        inside = [_value(draw, depth - 1) for _ in range(draw.randrange(3))]
        return draw.choice([inside, dict(zip("xyz", inside, strict=False))])
    return draw.choice(simple)
