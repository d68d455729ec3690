"""Whether two schemas can hold for one value: only certain answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
