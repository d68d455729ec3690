"""What fields about tools come to, and how an answer with calls is read."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from model.chat import (
    FENCED,
    FORMS,
    JSON_LIST,
    LISTED,
    PARAMETERS,
    PLAIN,
    TAGGED,
    CallForm,
    ChatTemplate,
    Turns,
    literal,
)
from server.api.chat.calls import (
    Arguments,
    CallBegins,
    CallReader,
    Piece,
    Text,
    ToolCallsFormat,
    ToolChoice,
    ToolUse,
    tool_use,
)
from server.api.chat.messages import FunctionTool
from server.api.schemas.requests import JsonObjectFormat, RegexFormat, TextFormat
from server.errors import InvalidRequest

CHOICE: TypeAdapter[Any] = TypeAdapter(ToolChoice)


def tool(name: str, **more: Any) -> FunctionTool:
    function = {"name": name, **more}
    return FunctionTool.model_validate({"type": "function", "function": function})


def used(choice: object = None, tools: Any = None, **more: Any) -> ToolUse:
    given = {"parallel": None, "response_format": None, "template": ChatTemplate(PLAIN), **more}
    tools = [tool("look"), tool("go")] if tools is None else tools
    return tool_use(tools, None if choice is None else CHOICE.validate_python(choice), **given)


def format_of(use: ToolUse) -> ToolCallsFormat:
    assert isinstance(use.format, ToolCallsFormat) and use.calls is not None
    assert use.format.form == use.calls.name
    return use.format


NAMED = {"type": "function", "function": {"name": "go"}}


def test_none_hides_the_tools_from_the_model() -> None:
    wanted = TextFormat(type="text")
    assert used("none", response_format=wanted) == ToolUse((), wanted)
    assert used("auto", tools=[]) == ToolUse((), None)


def test_auto_lets_the_model_choose() -> None:
    use = used()
    assert [shown.function.name for shown in use.shown] == ["look", "go"]
    assert format_of(use).max_calls == 16
    assert format_of(use).otherwise == TextFormat(type="text")
    either = used("auto", response_format=JsonObjectFormat(type="json_object"))
    assert format_of(either).otherwise == JsonObjectFormat(type="json_object")


def test_required_wants_a_call_and_a_name_wants_that_one() -> None:
    required = format_of(used("required", template=ChatTemplate("")))
    assert (len(required.functions), required.max_calls, required.otherwise) == (2, 1, None)
    named = used(NAMED, template=ChatTemplate(""))
    assert len(named.shown) == 2
    assert [function["name"] for function in format_of(named).functions] == ["go"]
    assert format_of(named).max_calls == 1


@pytest.mark.parametrize(
    ("choice", "parallel", "most"),
    [
        ("auto", None, 16),
        ("auto", False, 1),
        ("required", None, 1),
        ("required", True, 16),
        (NAMED, True, 1),
    ],
)
def test_several_calls_are_for_the_model_or_the_client_to_choose(
    choice: object, parallel: bool | None, most: int
) -> None:
    assert format_of(used(choice, parallel=parallel)).max_calls == most


def test_form_of_a_call_is_that_of_the_template() -> None:
    listed = "List of tools: <|tool_list_start|>["
    known = (("<tool_call>", TAGGED), ("```json", FENCED), (listed, LISTED))
    for shown, form in (*known, ("<TOOLCALL>[", JSON_LIST)):
        use = used(template=ChatTemplate("{{ tools }} arguments " + shown))
        assert (use.calls, dict(use.variables)) == (form, {})
    bare = ChatTemplate("", turns=Turns(calls=FENCED))
    use = used(NAMED, template=bare)
    assert (use.calls, use.variables) == (FENCED, {"tool_choice": "required"})


def test_form_knows_which_parameters_are_plain_text() -> None:
    shown = "<tool_call>\\n<function=f>\\n<parameter=p>\\n"
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    tools = [tool("look", parameters={"properties": properties}), tool("go")]
    use = used(tools=tools, template=ChatTemplate("{{ tools }} arguments " + shown))
    assert use.calls is not None and use.calls.name == PARAMETERS.name
    assert use.calls.texts == {"look": {"a"}, "go": set()}


def test_function_without_parameters_takes_an_empty_object() -> None:
    (function,) = format_of(used(NAMED)).functions
    assert function["schema"] == {"type": "object", "properties": {}, "additionalProperties": False}
    (open_one,) = format_of(used("required", [tool("f", parameters={"properties": {}})])).functions
    assert open_one["schema"]["type"] == "object"


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("tools", {"template": ChatTemplate("{{ tools }} arguments in another way")}),
        ("tools", {"tools": [tool("f"), tool("f")]}),
        ("tools", {"choice": "required", "tools": [tool("f", parameters={"type": "array"})]}),
        ("tool_choice", {"choice": "required", "tools": []}),
        ("tool_choice", {"choice": {"type": "function", "function": {"name": "fly"}}}),
        (
            "response_format",
            {"choice": NAMED, "response_format": JsonObjectFormat(type="json_object")},
        ),
        ("response_format", {"response_format": RegexFormat(type="regex", regex="a")}),
    ],
)
def test_what_does_not_go_together_is_refused(param: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        used(**options)
    assert refused.value.param == param


def read(*texts: str, is_whole: bool = True, form: CallForm = TAGGED) -> tuple[list[Piece], bool]:
    """The pieces with neighbours of one kind joined, and whether all of it was calls."""
    reader = CallReader(form)
    pieces = [piece for text in texts for piece in reader.push(text)]
    pieces += reader.end(is_whole)
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Arguments) and isinstance(last, Arguments):
            joined[-1] = Arguments(last.index, last.text + piece.text)
        else:
            joined.append(piece)
    return joined, reader.is_complete


def written(form: CallForm, name: str, arguments: str) -> str:
    if form.parameter is not None:
        value = form.parameter
        arguments = "".join(
            f"{value.begin}{key}{value.middle}\n{json.dumps(item)}{value.end}"
            for key, item in json.loads(arguments).items()
        )
    if form.is_python:
        keywords = json.loads(arguments)
        arguments = ", ".join(f"{key}={literal(item)}" for key, item in keywords.items())
    return form.begin + name + form.middle + arguments + form.end


LOOK = written(TAGGED, "look", '{"a": "}\\n</tool_call>"}')
LOOKED: list[Piece] = [CallBegins(0, "look"), Arguments(0, '{"a": "}\\n</tool_call>"}')]


@settings(deadline=None)
@given(st.lists(st.integers(0, 120), max_size=12), st.sampled_from([*FORMS.values()]))
def test_calls_are_parsed_at_any_chunk_boundary(cuts: list[int], form: CallForm) -> None:
    arguments = json.dumps({"a": form.end})
    calls = written(form, "look", arguments), written(form, "go", "{}")
    text = form.opening + form.between.join(calls) + form.closing
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    looked = [CallBegins(0, "look"), Arguments(0, arguments)]
    found = read(*pieces, form=form)
    assert found == ([*looked, CallBegins(1, "go"), Arguments(1, "{}")], True)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<tool_call", ">", "\n", "<", "a", " "]), max_size=6))
def test_other_answers_are_text(words: list[str]) -> None:
    text = "".join(words)
    if text.startswith("<tool_call>"):
        return
    assert read(*words) == ([Text(text)] if text else [], False)


@pytest.mark.parametrize("size", range(len(LOOK)))
def test_call_that_is_cut_short_is_not_complete(size: int) -> None:
    pieces, is_complete = read(LOOK[:size], is_whole=False)
    assert not is_complete
    if size < len('<tool_call>\n{"name": "look", "arguments": '):
        assert pieces == []
    elif pieces:
        assert pieces[0] == LOOKED[0]
        assert all(LOOKED[1].text.startswith(piece.text) for piece in pieces[1:])  # type: ignore[union-attr]


def test_arguments_are_streamed() -> None:
    reader = CallReader()
    assert reader.push('<tool_call>\n{"name": "look", "arguments": {"a"') == [
        CallBegins(0, "look"),
        Arguments(0, '{"a"'),
    ]
    assert reader.push(": 1}") == [Arguments(0, ": 1}")]
    assert reader.push("}") == []
    assert reader.push("\n</tool_call>") == []
    assert reader.is_complete


@pytest.mark.parametrize("value", ["5", '"}"', "[{}, [1]]", r'{"a\\": "\"}]", "b": {}}', '"\\\\"'])
def test_arguments_end_at_a_bracket_that_they_did_not_open(value: str) -> None:
    assert json.loads(value) is not None
    text = f'<TOOLCALL>[{{"name": "f", "arguments": {value}}}]</TOOLCALL>'
    assert read(*text, form=JSON_LIST) == ([CallBegins(0, "f"), Arguments(0, value)], True)
    assert read(text, form=JSON_LIST) == ([CallBegins(0, "f"), Arguments(0, value)], True)
    _, is_complete = read(text[:-1], form=JSON_LIST)
    assert not is_complete
