"""A client's JSON schema, brought into the one form that is compiled.

Everything that llguidance would pass over in silence is refused here by name, and
drafts 4 to 2019-09 are written as 2020-12. What the schema leaves open is filled in,
so that every text is one that JSON parsers read: numbers end at `MAX_NUMBER`,
which also keeps exponents out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from server.constraints.dialects import plain
from server.constraints.errors import FormatRefused, RefusedAt

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

Schema = dict[str, Any]


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
            name: next(free for free in _names(name) if free not in taken)
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


def _names(name: str) -> Any:
    while True:
        yield name
        name += "_"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
