"""What generators of schemas write, in plain JSON schema: pydantic's, zod's, OpenAPI 3.0's.

Annotations are left out, and what has an equal form is written in it. A ``oneOf`` whose
alternatives exclude each other is an ``anyOf``. Nothing here widens a schema; what is not
known stays for `server.constraints.json_schema` to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from server.constraints.exclusive import Exclusive

Schema = dict[str, Any]

ANNOTATIONS = frozenset(
    ("contentSchema", "discriminator", "example", "externalDocs", "xml", "enumNames")
)

#: Of JSON schema's own formats, those that are enforced; others of its own are refused.
CHECKED = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
REFUSED = frozenset(
    (
        *("idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
INT32 = 2**31

#: Patterns that pydantic writes with a look-ahead, and the same without: of a decimal number.
_EQUAL_PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
}

MAPS = ("$defs", "definitions", "properties", "patternProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ONES = ("additionalProperties", "additionalItems", "items")


def plain(schema: Mapping[str, Any]) -> Schema:
    """``schema``, which is not changed, without what only its generator knows."""
    written = _written(dict(schema), Exclusive(schema))
    assert isinstance(written, dict)
    return written


def _written(schema: Any, exclusive: Exclusive) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = {name: value for name, value in schema.items() if not _is_annotation(name)}
    _format(result)
    _names(result, exclusive)
    if result.get("uniqueItems") is True and _at_most_one(result):
        del result["uniqueItems"]
    if isinstance(result.get("oneOf"), list):
        _one_of(result, schema, exclusive)
    for name in MAPS:
        if isinstance(found := result.get(name), dict):
            result[name] = {key: _written(item, exclusive) for key, item in found.items()}
    for name in LISTS:
        if isinstance(found := result.get(name), list):
            result[name] = [_written(item, exclusive) for item in found]
    for name in ONES:
        if isinstance(result.get(name), dict):
            result[name] = _written(result[name], exclusive)
    return _nullable(result)


def _is_annotation(keyword: str) -> bool:
    """Llguidance's own extension is not an annotation: it would be obeyed."""
    return keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance")


def _format(schema: Schema) -> None:
    """A format that JSON schema does not define says nothing about the text, but for int32."""
    format = schema.get("format")
    if not isinstance(format, str):
        return
    if format == "int32":
        schema.setdefault("minimum", -INT32)
        schema.setdefault("maximum", INT32 - 1)
    if format not in CHECKED | REFUSED or schema.get("type") in ("integer", "number"):
        del schema["format"]
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _EQUAL_PATTERNS.get(pattern, pattern)


def _names(schema: Schema, exclusive: Exclusive) -> None:
    """``propertyNames`` that allow all names, or some that are listed."""
    names = exclusive.resolved(schema.get("propertyNames"))
    if names is True or (isinstance(names, dict) and _meaning(names) == {"type": "string"}):
        del schema["propertyNames"]
        return
    listed = names.get("enum", [names.get("const")]) if isinstance(names, dict) else []
    if not isinstance(listed, list) or not listed:
        return
    are_all = all(isinstance(name, str) for name in listed)
    if are_all and not schema.keys() & {"properties", "patternProperties"}:
        del schema["propertyNames"]
        schema["properties"] = dict.fromkeys(listed, schema.get("additionalProperties", True))
        schema["additionalProperties"] = False


def _meaning(schema: Schema) -> Schema:
    return {k: v for k, v in schema.items() if k not in ("title", "description", "$comment")}


def _at_most_one(schema: Schema) -> bool:
    most = schema.get("maxItems")
    return isinstance(most, int) and most <= 1


def _one_of(result: Schema, schema: Schema, exclusive: Exclusive) -> None:
    """``anyOf`` instead, where no two alternatives can hold at once.

    OpenAPI's discriminator is a property that each alternative must have.
    """
    alternatives = result["oneOf"]
    discriminator = schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(name, str):
        alternatives = [_with_required(exclusive.resolved(item), name) for item in alternatives]
    pairs = combinations(alternatives, 2)
    if "anyOf" not in result and all(exclusive.excludes(one, other) for one, other in pairs):
        del result["oneOf"]
        result["anyOf"] = alternatives


def _with_required(schema: Any, name: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or name not in properties:
        return schema
    required = schema.get("required", [])
    return (
        schema
        if not isinstance(required, list) or name in required
        else {**schema, "required": [*required, name]}
    )


def _nullable(schema: Schema) -> Schema:
    """OpenAPI 3.0's word for a value that may also be null."""
    nullable = schema.get("nullable")
    if not isinstance(nullable, bool):
        return schema
    inner = {name: value for name, value in schema.items() if name != "nullable"}
    kind = inner.get("type")
    if not nullable or (kind is None and len(_meaning(inner)) == 0):
        return inner
    if isinstance(kind, str) and not inner.keys() & {"const", "enum", "allOf", "anyOf", "$ref"}:
        return {**inner, "type": [kind, "null"]}
    values = inner.get("enum")
    if isinstance(values, list) and None in values:
        kinds = [kind, "null"] if isinstance(kind, str) else kind
        return {**inner, "type": kinds} if kind is not None else inner
    kept = ("$schema", "$defs", "definitions")
    shared: Schema = {name: inner.pop(name) for name in kept if name in inner}
    return {**shared, "anyOf": [inner, {"type": "null"}]}
