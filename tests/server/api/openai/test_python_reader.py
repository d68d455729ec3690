"""Calls in Python's syntax come to the client as JSON, wherever they are cut."""

from __future__ import annotations

import ast
import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from model.chat import literal, written
from server.api.chat.calls import PythonReader

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
NAMES = st.from_regex("[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True)


@settings(deadline=None)
@given(VALUES)
def test_python_reads_the_literals_that_are_written(value: Any) -> None:
    assert ast.literal_eval(literal(value)) == value


@settings(deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=3), st.lists(st.integers(0, 80), max_size=6))
def test_arguments_are_read_at_any_chunk_boundary(
    arguments: dict[str, Any], cuts: list[int]
) -> None:
    whole = written([{"function": {"name": "f", "arguments": arguments}}])
    text = whole.removeprefix("<|tool_call_start|>[f(")
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader = PythonReader()
    read = "".join(reader.push(text[start:end]) for start, end in pairwise(places))
    assert (json.loads(read), reader.rest) == (arguments, "]<|tool_call_end|>")
    assert json.dumps(json.loads(read)) == json.dumps(arguments)


def test_arguments_are_streamed() -> None:
    reader = PythonReader()
    assert reader.push('place="Os') == '{"place": "Os'
    assert reader.push("lo\\") == "lo"
    assert reader.push('"') == '\\"'
    assert reader.push('", is_near=Tr') == '", "is_near": '
    assert reader.push("ue") == ""
    assert reader.push(", n=[1") == 'true, "n": [1'
    assert reader.push("])") == "]}"
    assert reader.is_over


def test_several_calls_are_one_list() -> None:
    calls: list[dict[str, Any]] = [
        {"function": {"name": "f", "arguments": {"a": None, "b": [True, "\n"]}}},
        {"function": {"name": "g", "arguments": {}}},
    ]
    expected = '<|tool_call_start|>[f(a=None, b=[True, "\\n"]), g()]<|tool_call_end|>'
    assert written(calls) == expected
