"""Arguments in Python's syntax conform to the function's schema, and Python reads them alike."""

from __future__ import annotations

import ast
import json
from typing import Any

import jsonschema
import pytest

from model.chat import LISTED
from server.api.chat.calls import Arguments, CallReader
from server.constraints.compiler import FormatCompiler
from server.errors import InvalidRequest
from tests.server.constraints.test_tool_calls import (
    TEXT,
    accepts,
    calls,
    constraints,
    drawn,
    start,
)

__all__ = ["constraints"]
pytestmark = pytest.mark.process

BOOLEAN, TEXT_VALUE, INTEGER = {"type": "boolean"}, {"type": "string"}, {"type": "integer"}
EVERYTHING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {**TEXT_VALUE, "maxLength": 8},
        "is_set": BOOLEAN,
        "number": {"type": "number", "minimum": 0, "maximum": 9},
        "plain": {"type": "array", "items": INTEGER, "maxItems": 2},
        "flags": {"type": "array", "items": BOOLEAN, "minItems": 1, "maxItems": 3},
        "pair": {"prefixItems": [{"type": "null"}, INTEGER], "items": False, "type": "array"},
        "maybe": {"type": ["string", "null"], "maxLength": 4},
        "one": {"enum": [True, None, 1, "x", [False]]},
        "named": {"type": "object", "additionalProperties": BOOLEAN},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["is_set", "tree"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": BOOLEAN,
                "under": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}


def in_form(*written: str) -> str:
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


async def test_python_reads_what_is_drawn_as_the_client_does(constraints: FormatCompiler) -> None:
    functions = [{"name": name, "schema": EVERYTHING} for name in ("f", "g")]
    beginning = await start(constraints, calls(*functions, most=2, form=LISTED))
    for seed in range(30):
        text = drawn(beginning.copy(), seed, 200)
        reader = CallReader(LISTED)
        read = dict[int, str]()
        for piece in reader.push(text):
            if isinstance(piece, Arguments):
                read[piece.index] = read.get(piece.index, "") + piece.text
        assert reader.is_complete, text
        inside = text.removeprefix(LISTED.opening).removesuffix(LISTED.closing)
        parsed = ast.parse(f"[{inside}]", mode="eval").body
        assert isinstance(parsed, ast.List)
        by_python = [
            {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            for call in parsed.elts
            if isinstance(call, ast.Call)
        ]
        by_client = [json.loads(read[index]) for index in sorted(read)]
        assert json.dumps(by_client) == json.dumps(by_python), text
        for arguments in by_client:
            jsonschema.validate(arguments, EVERYTHING)


async def accepts_arguments(
    constraints: FormatCompiler, schema: dict[str, Any], written: str
) -> bool:
    format = calls({"name": "f", "schema": {"type": "object", **schema}}, form=LISTED)
    return await accepts(constraints, format, in_form(f"f({written})"))


async def test_keywords_come_in_their_order_and_no_others(constraints: FormatCompiler) -> None:
    schema = {"properties": {"a": BOOLEAN, "b": INTEGER, "c": TEXT_VALUE}, "required": ["b"]}
    for written in ("b=1", "a=True, b=1", 'b=1, c="x"', 'a=False, b=-2, c=""'):
        assert await accepts_arguments(constraints, schema, written), written
    for written in ("", "a=True", "b=1, a=True", "b=1, b=1", "b=1,", "b=1, d=2", "b=1 , c=2"):
        assert not await accepts_arguments(constraints, schema, written), written
    optional = {"properties": {"a": BOOLEAN, "b": INTEGER}}
    for written in ("", "a=True", "b=1", "a=True, b=1"):
        assert await accepts_arguments(constraints, optional, written), written


LISTS = {"type": "array", "items": BOOLEAN}
PAIR = {"type": "array", "prefixItems": [BOOLEAN, INTEGER]}
OPEN = {"type": "object", "properties": {"a": BOOLEAN}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (BOOLEAN, ("True", "False"), ("true", "1", '"True"', "None")),
        ({"type": ["integer", "null"]}, ("3", "None"), ("null", "3.5")),
        (TEXT_VALUE, ('"a\\n\\"b\\""', '")"', '"größer 🙂"'), ("'a'", '"\n"')),
        ({**TEXT_VALUE, "pattern": "^[a-z]+$"}, ('"ab"',), ('"A"',)),
        ({"type": "integer", "minimum": 2, "maximum": 4}, ("3",), ("5", "3.0")),
        ({"type": "object", "additionalProperties": INTEGER}, ('{"a": 1}',), ("{a: 1}",)),
        ({"enum": [True, 1, None, "é"]}, ("True", "1", "None", '"é"'), ("False", "0")),
        ({"type": "boolean", "enum": [True, "x"]}, ("True",), ("False", '"x"')),
        ({"const": {"a": [None]}}, ('{"a": [None]}',), ('{"a": []}',)),
        ({"anyOf": [BOOLEAN, INTEGER]}, ("True", "7"), ("None", '"7"')),
        (LISTS, ("[]", "[True]", "[True, False, True]"), ("[true]", "[True,]", "[1]")),
        ({**LISTS, "minItems": 2, "maxItems": 3}, ("[True, True]",), ("[True]", "[]")),
        ({**LISTS, "maxItems": 2}, ("[]", "[True, True]"), ("[True, True, True]",)),
        (
            {**PAIR, "items": False},
            ("[]", "[True]", "[True, 1]"),
            ("[1]", "[True, 1, 2]"),
        ),
        ({**PAIR, "items": BOOLEAN, "minItems": 3}, ("[True, 1, False]",), ("[True, 1]",)),
        ({**OPEN, "required": ["a"]}, ('{"a": True}',), ("{}", '{"a": 1}', '{"a": True, "b": 1}')),
        (
            {**OPEN, "additionalProperties": LISTS},
            ("{}", '{"a": True}', '{"b": [True]}', '{"a": True, "b": []}'),
            ('{"a": []}', '{"\\u0061": []}', '{"b": True}'),
        ),
        ({}, ("None", "[True, {}, 1.5]", '{"a": {"b": "c"}}'), ("null", "[true]")),
    ],
)
async def test_value_follows_its_schema(
    constraints: FormatCompiler, schema: Any, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    for value in (*good, *bad):
        given = {"properties": {"a": schema}, "required": ["a"]}
        assert await accepts_arguments(constraints, given, f"a={value}") == (value in good), value


async def test_answer_is_text_or_a_list_of_calls(constraints: FormatCompiler) -> None:
    format = calls({"name": "f", "schema": {"type": "object"}}, most=2, otherwise=TEXT, form=LISTED)
    for text in ("It rains.", "<|tool_call", "[f()]", in_form("f()"), in_form("f()", "f()")):
        assert await accepts(constraints, format, text), text
    for text in ("<|tool_call_start|>", in_form(), f"{in_form('f()')}!", in_form(*["f()"] * 3)):
        assert not await accepts(constraints, format, text), text


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "object", "properties": {"a b": TEXT_VALUE}}, "properties"),
        ({"type": "object", "properties": {"a": {**OPEN, "minProperties": 1}}}, "minProperties"),
        (
            {"type": "object", "properties": {"a": {"patternProperties": {"^a": BOOLEAN}}}},
            "patternProperties",
        ),
        ({"type": "object", "properties": {"a": {**OPEN, "required": ["b"]}}}, "required"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, r"\$ref"),
    ],
)
async def test_schema_that_cannot_be_written_is_refused(
    constraints: FormatCompiler, schema: Any, keyword: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"f: {keyword}"):
        await start(constraints, calls({"name": "f", "schema": schema}, form=LISTED))
