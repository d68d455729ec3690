"""A client's JSON schema, brought into the one form that is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

# -------------------------------------------------------------------------------------------------
# Why a format is refused.


class FormatRefused(ValueError):
    """A format that is wrong, not supported, or too much work. The message is for the client."""


class NotTried(FormatRefused):
    """No fault of the format that is known of: another time it may be taken."""


class RefusedAt(FormatRefused):
    """A refusal that says at which place of a schema."""


# -------------------------------------------------------------------------------------------------
# Whether two schemas can hold for one value: only certain answers.


#: References and properties followed on the way to a difference.
MAX_DEPTH = 8
#: Pairs that are compared in one document: alternatives within alternatives are very many.
MAX_PAIRS = 100_000

KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}

NULL = {"type": "null"}


class Exclusive:
    """Compares schemas of one document, whose ``root`` has what they refer to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_pairs = 0

    def resolved(self, schema: Any) -> Any:
        """``schema``, or what it refers to if it does nothing else."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            if schema.keys() - {"$ref", "title", "description", "default"}:
                return schema
            schema = self._found(schema["$ref"])
        return schema

    def excludes(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether no value can be of both."""
        self._num_pairs += 1
        if self._num_pairs > MAX_PAIRS:
            return False
        one, other = self.resolved(one), self.resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth > MAX_DEPTH:
            return False
        for mine, theirs in ((one, other), (other, one)):
            if mine.get("nullable") is True and not self.excludes(NULL, theirs, depth + 1):
                return False
        for mine, theirs in ((one, other), (other, one)):
            for keyword in ("anyOf", "oneOf"):
                parts = mine.get(keyword)
                if isinstance(parts, list) and all(
                    self.excludes(part, theirs, depth + 1) for part in parts
                ):
                    return True
            parts = mine.get("allOf")
            if isinstance(parts, list) and any(
                self.excludes(part, theirs, depth + 1) for part in parts
            ):
                return True
        return self._differ(one, other, depth)

    def _differ(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        if _values_differ(one, other):
            return True
        mine, theirs = _kinds(one), _kinds(other)
        if mine is None or theirs is None:
            return False
        common = mine & theirs
        return not common or (common == {"object"} and self._objects_differ(one, other, depth))

    def _objects_differ(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """By a property that both must have, or that one must have and the other must not."""
        mine, theirs = _required(one), _required(other)
        for name in mine & theirs:
            a, b = _property(one, name), _property(other, name)
            if self.excludes(a, b, depth + 1):
                return True
        return any(_property(other, name) is False for name in mine) or any(
            _property(one, name) is False for name in theirs
        )

    def _found(self, ref: str) -> Any:
        place: Any = self._root
        for name in ref.removeprefix("#").split("/")[1:]:
            place = place.get(name) if isinstance(place, dict) else None
        return place if ref.startswith("#") else None


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    """The types that its values may have; None for any."""
    if (values := _values(schema)) is not None:
        return {KINDS[type(value)] for value in values}
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else kind
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return {"number" if name == "integer" else name for name in names}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _values_differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    mine, theirs = _values(one), _values(other)
    if mine is None or theirs is None:
        return False
    return not any(_same(a, b) for a in mine for b in theirs)


def _same(a: Any, b: Any) -> bool:
    """JSON's equality: true is not a number."""
    return KINDS.get(type(a)) == KINDS.get(type(b)) and bool(a == b)


def _required(schema: dict[str, Any]) -> set[str]:
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return {name for name in names if isinstance(name, str)}


def _property(schema: dict[str, Any], name: str) -> Any:
    """What a property of that name must be; True for anything."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


# -------------------------------------------------------------------------------------------------
# What generators of schemas write, in plain JSON schema: pydantic's, zod's, OpenAPI 3.0's.
#
# Annotations are left out, and what has an equal form is written in it. A ``oneOf`` whose
# alternatives exclude each other is an ``anyOf``. Nothing here widens a schema; what is not
# known stays for `server.constraints.schema` to refuse.


Schema = dict[str, Any]

OTHER_ANNOTATIONS = frozenset(
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
    return keyword in OTHER_ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance")


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


# -------------------------------------------------------------------------------------------------
# Everything that llguidance would pass over in silence is refused here by name, and
# drafts 4 to 2019-09 are written as 2020-12. What the schema leaves open is filled in,
# so that every text is one that JSON parsers read: numbers end at `MAX_NUMBER`,
# which also keeps exponents out.


#: Numbers are between this and its negative: more digits are not read back alike everywhere.
MAX_NUMBER = 10**18

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

DRAFTS = frozenset(
    f"{scheme}://json-schema.org/{name}/schema"
    for scheme in ("http", "https")
    for name in ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
)
_TEXTS = ("$comment", "title", "description", "default", "deprecated", "examples")
_USES = ("readOnly", "writeOnly", "contentMediaType", "contentEncoding")
ANNOTATIONS = frozenset((*_TEXTS, *_USES))
APPLICATORS = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
PLAIN = frozenset(("type", "const", "enum", "required", "multipleOf", "pattern", "format", *COUNTS))


def normal(schema: Mapping[str, Any], closed: bool = False) -> Schema:
    """``schema`` as it is compiled; it is not changed. Raises `FormatRefused` with the keyword.

    With ``closed`` an object has no properties but those that are listed, where some are
    and the schema does not say otherwise.
    """
    return _Rewriting(plain(schema), closed).result()


class _Rewriting:
    """One schema on its way. ``places`` are the pointers of all schemas in the result."""

    def __init__(self, schema: Mapping[str, Any], closed: bool) -> None:
        self._schema = schema
        self._places: set[str] = set()
        self._refs: list[str] = []
        self._in_one_of = 0
        # What may be anything is left to llguidance: the reference would be followed without end.
        self._intersects = _intersects(schema)
        # Two schemas for one object would each forbid what the other has.
        self._closes = closed and not self._intersects
        taken = _mapping(schema, "$defs").keys()
        # Compiled once, however often a schema has them.
        self._shared = {
            name: next(free for free in _numbered(name) if free not in taken)
            for name in ("any", "number", "integer")
        }

    def result(self) -> Schema:
        root = dict(self._schema)
        draft = root.pop("$schema", None)
        if draft is not None and (not isinstance(draft, str) or draft.rstrip("#") not in DRAFTS):
            raise FormatRefused("$schema: not a draft that is known here (4 to 2020-12)")
        root.pop("$id", None)
        root.pop("id", None)
        result = self._rewrite(root, "#")
        for ref in self._refs:
            if ref not in self._places:
                raise FormatRefused(f"$ref: {_short(ref)} is not the place of a schema in this one")
        bounds = {"minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}
        anything = {"items": self._share("any"), "additionalProperties": self._share("any")}
        shared = {
            "any": {"type": list(TYPES), **bounds, **anything},
            "number": {"type": "number", **bounds},
            "integer": {"type": "integer", **bounds},
        }
        named = {self._shared[name]: schema for name, schema in shared.items()}
        result["$defs"] = {**result.get("$defs", {}), **named}
        return result

    def _share(self, name: str) -> Schema:
        if name == "any" and self._intersects:
            return {}
        return {"$ref": f"#/$defs/{self._shared[name]}"}

    def _rewrite(self, schema: object, place: str) -> Schema:
        """A schema at ``place`` in the result, which is added to the places."""
        self._places.add(place)
        if schema is True:
            return self._share("any")
        if not isinstance(schema, dict):
            if schema is False:
                return {"enum": []}
            raise FormatRefused(f"{_short(place)}: a schema must be an object or a boolean")
        try:
            return self._closed(self._keywords(schema, place))
        except FormatRefused as refusal:
            if isinstance(refusal, RefusedAt) or place == "#":
                raise
            raise RefusedAt(f"{refusal} (at {_short(place)})") from None

    def _keywords(self, schema: Schema, place: str) -> Schema:
        result: Schema = {}
        if self._closes and "properties" in schema and "patternProperties" not in schema:
            schema = {"additionalProperties": False, **schema}
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS:
                continue
            if keyword in PLAIN:
                result[keyword] = _finite(keyword, value)
                if keyword == "minProperties":
                    _few_free_names(schema)
            elif keyword in BOUNDS:
                result.update(_bound(keyword, value, schema))
            elif keyword in _NESTED:
                result.update(_NESTED[keyword](self, keyword, value, schema, place))
            elif keyword == "$ref":
                result["$ref"] = self._ref(value)
            elif keyword != "additionalItems" or not isinstance(schema.get("items"), list):
                raise FormatRefused(f"{_short(keyword)}: this JSON schema keyword is not supported")
        return result

    def _closed(self, result: Schema) -> Schema:
        """With what is left open filled in. Applicators narrow, and are filled in themselves."""
        meaning = result.keys() - {"$defs", "definitions"}
        if not meaning:
            return {**result, **self._share("any")}
        if meaning & set(APPLICATORS):
            return result
        types = result.get("type", TYPES)
        if types in ("number", "integer") and meaning == {"type"} and not self._in_one_of:
            del result["type"]
            return {**result, **self._share(types)}
        types = (types,) if isinstance(types, str) else types
        if not isinstance(types, list | tuple) or not all(name in TYPES for name in types):
            raise FormatRefused(f"type: must be one or more of {', '.join(TYPES)}")
        if "number" in types or "integer" in types:
            if "minimum" not in result and "exclusiveMinimum" not in result:
                result["minimum"] = -MAX_NUMBER
            if "maximum" not in result and "exclusiveMaximum" not in result:
                result["maximum"] = MAX_NUMBER
        if "array" in types:
            result.setdefault("items", self._share("any"))
        if "object" in types:
            result.setdefault("additionalProperties", self._share("any"))
        return result

    def _ref(self, ref: object) -> str:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")) or ref == "#/":
            raise FormatRefused("$ref: only references into the same schema, #/..., are supported")
        if "%" in ref or "~" in ref:
            raise FormatRefused("$ref: names with ~, / or escapes are not supported")
        self._refs.append(ref)
        return ref

    def _map(self, keyword: str, value: object, _: Schema, place: str) -> Schema:
        if not isinstance(value, dict):
            raise FormatRefused(f"{keyword}: must be an object of schemas")
        inside = {
            name: self._rewrite(schema, f"{place}/{keyword}/{name}")
            for name, schema in value.items()
        }
        return {keyword: inside}

    def _list(self, keyword: str, value: object, _: Schema, place: str) -> Schema:
        if not isinstance(value, list) or not value:
            raise FormatRefused(f"{keyword}: must be a list of schemas")
        # What is behind a reference is not seen to differ from another alternative.
        self._in_one_of += keyword == "oneOf"
        inside = [self._rewrite(item, f"{place}/{keyword}/{i}") for i, item in enumerate(value)]
        self._in_one_of -= keyword == "oneOf"
        return {keyword: inside}

    def _one(self, keyword: str, value: object, _: Schema, place: str) -> Schema:
        return {keyword: self._rewrite(value, f"{place}/{keyword}")}

    def _items(self, keyword: str, value: object, schema: Schema, place: str) -> Schema:
        """A list of them was ``prefixItems`` before 2020-12, and ``additionalItems`` the rest."""
        if not isinstance(value, list):
            return self._one(keyword, value, schema, place)
        if "prefixItems" in schema:
            raise FormatRefused("items: must be one schema next to prefixItems")
        rest = self._one("items", schema.get("additionalItems", True), schema, place)
        if not value:
            return rest
        return {**self._list("prefixItems", value, schema, place), **rest}

    def _unique(self, keyword: str, value: object, _: Schema, __: str) -> Schema:
        if value is not False:
            raise FormatRefused(f"{keyword}: this JSON schema keyword is not supported")
        return {}


_Rule = Callable[[_Rewriting, str, Any, Schema, str], Schema]

_NESTED: dict[str, _Rule] = {
    **dict.fromkeys(("$defs", "definitions", "properties", "patternProperties"), _Rewriting._map),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _Rewriting._list),
    "additionalProperties": _Rewriting._one,
    "items": _Rewriting._items,
    "uniqueItems": _Rewriting._unique,
}


def _intersects(schema: object) -> bool:
    """Whether two schemas hold for one value anywhere in ``schema``."""
    if isinstance(schema, list):
        return any(map(_intersects, schema))
    if not isinstance(schema, dict):
        return False
    applied = [keyword for keyword in APPLICATORS if keyword in schema]
    meaning = schema.keys() - ANNOTATIONS - {"$schema", "$id", "id", "$defs", "definitions"}
    if "allOf" in applied or (applied and len(meaning) > 1):
        return True
    return any(map(_intersects, schema.values()))


def _few_free_names(schema: Schema) -> None:
    """Llguidance does not keep apart names that are not in ``properties``: two may be the same."""
    least, required = schema["minProperties"], schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple) and least > len(required) + 1:
        raise FormatRefused(
            "minProperties: more than one name beyond those required is not supported"
        )


def _bound(keyword: str, value: object, schema: Schema) -> Schema:
    """Draft 4 has booleans next to ``minimum`` and ``maximum``."""
    if keyword.startswith("exclusive") and isinstance(value, bool):
        plain = keyword.removeprefix("exclusive").lower()
        return {keyword: _number(plain, schema[plain])} if value and plain in schema else {}
    return {keyword: _number(keyword, value)}


def _number(keyword: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormatRefused(f"{keyword}: must be a number")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise FormatRefused(f"{keyword}: must be between -10^18 and 10^18")
    return value


def _finite(keyword: str, value: object) -> object:
    """``value``; raises if it contains a number that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        raise FormatRefused(f"{keyword}: must be a finite number")
    for inner in value.values() if isinstance(value, dict) else ():
        _finite(keyword, inner)
    for inner in value if isinstance(value, list) else ():
        _finite(keyword, inner)
    return value


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _numbered(name: str) -> Any:
    while True:
        yield name
        name += "_"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
