"""What a schema may say: all else is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.constraints.schema import FormatRefused, normal
from tests.server.constraints.drawing import accepts, compiled, of_schema

NOT_SUPPORTED = {
    "not": {},
    "if": {},
    "then": {},
    "else": {},
    "contains": {},
    "minContains": 1,
    "maxContains": 1,
    "uniqueItems": True,
    "propertyNames": {"minLength": 3},
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "$anchor": "a",
    "$vocabulary": {},
    "x-guidance": {"lenient": True},
    "minLenght": 3,
}


@pytest.mark.parametrize(("keyword", "value"), NOT_SUPPORTED.items())
def test_keyword_that_is_not_supported_is_named(keyword: str, value: Any) -> None:
    wrong = {"type": "object", keyword: value}
    for schema in (
        wrong,
        {"properties": {"a": wrong}},
        {"items": wrong},
        {"anyOf": [{}, wrong]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"additionalProperties": wrong}}},
    ):
        with pytest.raises(FormatRefused, match=f"^{keyword.replace('$', '.')}: "):
            normal(schema)


@pytest.mark.parametrize("draft", ["draft-04", "draft-06", "draft-07", "draft/2019-09"])
def test_keyword_of_no_draft_is_named_in_every_draft(draft: str) -> None:
    """Llguidance passes over what the named draft does not know."""
    schema = {"$schema": f"http://json-schema.org/{draft}/schema#", "unevaluatedItems": False}
    with pytest.raises(FormatRefused, match="unevaluatedItems"):
        normal(schema)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"$schema": "http://example.com/my-draft"}, "schema"),
        ({"$ref": "http://example.com/schema"}, "ref"),
        ({"$ref": "other.json"}, "ref"),
        ({"$ref": "#/$defs/missing"}, "ref"),
        ({"$ref": "#/const", "const": {"minLenght": 1}}, "ref"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {}}}, "ref"),
        ({"type": "any"}, "type"),
        ({"type": ["string", 3]}, "type"),
        ({"type": {}}, "type"),
        ({"minimum": "3"}, "minimum"),
        ({"maximum": True}, "maximum"),
        ({"minimum": 10**19}, "minimum"),
        ({"exclusiveMaximum": 1e300}, "exclusiveMaximum"),
        ({"const": float("inf")}, "const"),
        ({"enum": [{"a": [float("nan")]}]}, "enum"),
        ({"properties": []}, "properties"),
        ({"properties": {"a": 3}}, "must be an object or a boolean"),
        ({"anyOf": {}}, "anyOf"),
        ({"anyOf": []}, "anyOf"),
        ({"items": [{}], "prefixItems": [{}]}, "items"),
        ({"minProperties": 2}, "minProperties"),
        ({"required": ["a"], "minProperties": 3}, "minProperties"),
    ],
)
def test_bad_value_is_named(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatRefused, match=named):
        normal(schema)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "format": "iri"}, "format: iri"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"format": "email"}}, "propertyNames"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "("}, "unclosed"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "array", "minItems": "2"}, "minItems"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
        ({"enum": []}, "anyOf is empty"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
        (
            {"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}, "c": {}}},
            "Properties",
        ),
        ({"$ref": "#"}, "no text is allowed"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no end"),
        ({"type": "array", "minItems": 100_000}, "no end"),
        ({"type": "string", "minLength": 1_000_000}, "no end"),
        ({"type": "string", "pattern": "forty-two"}, "no end"),
    ],
)
def test_what_llguidance_does_not_support_is_refused(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatRefused, match=named) as refusal:
        compiled(of_schema(schema))
    assert len(str(refusal.value)) <= 300


def test_refusal_names_the_location() -> None:
    schema = {"properties": {"a": {"items": {"uniqueItems": True}}}}
    with pytest.raises(FormatRefused) as refusal:
        normal(schema)
    assert str(refusal.value).endswith("(at #/properties/a/items)")


def test_old_drafts_have_their_own_semantics() -> None:
    tuples = {"items": [{"const": 1}, {"const": 2}], "additionalItems": {"const": 3}}
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", **tuples}
    grammar = compiled(of_schema(schema))
    assert accepts(grammar, "[1,2,3,3]")
    assert not accepts(grammar, "[1,2,1]")
    bounds = {"minimum": 3, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}
    grammar = compiled(of_schema({"type": "integer", **bounds}))
    assert [number for number in range(12) if accepts(grammar, str(number))] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"type": ["integer", "object"]}])
def test_schema_is_not_changed(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    normal(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"type": "integer"}])
def test_numbers_have_no_more_digits_than_every_parser_reads(schema: dict[str, Any]) -> None:
    grammar = compiled(of_schema(schema))
    assert accepts(grammar, "999999999999999999")
    assert not accepts(grammar, "9" * 20)
    assert not accepts(grammar, "1e999")


def test_json_has_no_optional_white_space() -> None:
    grammar = compiled(of_schema({"type": "object", "additionalProperties": {"type": "null"}}))
    assert accepts(grammar, '{"a":null,"b":null}')
    for text in (' {"a":null}', '{ "a":null}', '{"a": null}', '{"a":null, "b":null}', "{}\n"):
        assert not accepts(grammar, text)
