"""Calls of a client's functions: what is asked of the model, and what it has called."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from model.chat import TAGGED, CallForm, ChatTemplate
from server.api.chat.messages import FunctionName, FunctionTool, tool_object
from server.api.schemas.requests import (
    FormatPart,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
)
from server.api.schemas.wire import Wire, of_type
from server.constraints.tool_calls import texts_of
from server.errors import invalid

# Every call is written under a grammar, so that its arguments follow the function's
# schema. See `model.chat` for how it looks.


#: Calls of one answer, where there may be several.
MAX_PARALLEL = 16


class ChosenFunction(Wire):
    """Which function must be called."""

    name: FunctionName


class NamedToolChoice(Wire):
    """That one function must be called."""

    type: Literal["function"]
    function: ChosenFunction

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: object) -> object:
        message = (
            "{} is not supported: name a function or allowed_tools, or give none, auto or required"
        )
        return of_type("function", value, message)


class AllowedFunction(Wire):
    """One that may be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedFunctions(Wire):
    """Those that may be called, or with ``required`` must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Field(fail_fast=True, min_length=1, max_length=128)]


class AllowedToolChoice(Wire):
    """That only some of the tools may be called; the model is told of all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def kind_of_choice(value: object) -> str:
    """The form of a ``tool_choice``, here and in Responses: ``word``, ``named`` or ``allowed``."""
    if not isinstance(value, dict | Wire):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedToolChoice, Tag("named")]
    | Annotated[AllowedToolChoice, Tag("allowed")],
    Discriminator(kind_of_choice),
]


class ToolCallsFormat(FormatPart):
    """What `server.constraints.tool_calls` compiles: no client can ask for it by itself."""

    type: Literal["tool_calls"] = "tool_calls"
    form: Annotated[str, StringConstraints(pattern="^[a-z_]+$")] = TAGGED.name
    functions: list[dict[str, Any]]
    max_calls: int
    otherwise: TextFormat | JsonObjectFormat | JsonSchemaFormat | None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``shown`` are the tools that the template writes; ``format`` is the answer's, None for any.

    The answer may be calls in the form ``calls``, for a `CallReader`; None where it may not.
    """

    shown: Sequence[FunctionTool]
    format: ResponseFormat | ToolCallsFormat | None
    calls: CallForm | None = None

    @property
    def variables(self) -> Mapping[str, Any]:
        """For the template: some tell the model that it must call."""
        is_forced = isinstance(self.format, ToolCallsFormat) and self.format.otherwise is None
        return {"tool_choice": "required"} if is_forced else {}


def tool_use(
    tools: Sequence[FunctionTool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    response_format: ResponseFormat | None,
    template: ChatTemplate,
) -> ToolUse:
    """What a request's fields come to with the chat template that there is.

    Raises `InvalidRequest` where they do not go together.
    """
    functions = {tool.function.name: tool for tool in tools or ()}
    if len(functions) != len(tools or ()):
        raise invalid("tools", "two functions have one name")
    mode, names = _chosen(choice, functions)
    if not names <= functions.keys():
        raise invalid("tool_choice", "names a function that is not in tools")
    if not functions and mode == "required":
        raise invalid("tool_choice", "needs tools")
    if not functions or mode == "none":
        return ToolUse((), response_format)
    is_forced = mode == "required"
    if not is_forced and template.calls is None:
        raise invalid(
            "tools",
            "the model's chat template does not teach it to call in a way that is known here; "
            "with tool_choice required or a named function a call can be had from any model",
        )
    wanted = [tool for name, tool in functions.items() if name in names]
    # A model that never learnt to stop calling would continue: more than it must is its own choice.
    is_named = isinstance(choice, NamedToolChoice)
    several = not is_named and (parallel if parallel is not None else not is_forced)
    calls = template.calls or template.turns.calls
    format = ToolCallsFormat(
        form=calls.name,
        functions=[_function(tool) for tool in wanted],
        max_calls=MAX_PARALLEL if several else 1,
        otherwise=_otherwise(response_format, is_forced),
    )
    shown = list(functions.values())
    return ToolUse(shown, format, with_texts(calls, map(tool_object, shown)))


def with_texts(form: CallForm, tools: Iterable[Mapping[str, Any]]) -> CallForm:
    """``form`` that knows which parameters of ``tools``, as templates read them, are plain text."""
    if form.parameter is None:
        return form
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    texts = {
        name: texts_of(function.get("parameters") or {}, form.parameter)
        for name, function in functions.items()
    }
    return replace(form, texts=texts)


def _chosen(choice: ToolChoice | None, functions: Collection[str]) -> tuple[str, Set[str]]:
    """Whether a call must be made, and of which functions: all of ``functions`` by default."""
    if isinstance(choice, NamedToolChoice):
        return "required", {choice.function.name}
    if isinstance(choice, AllowedToolChoice):
        allowed = choice.allowed_tools
        return allowed.mode, {tool.function.name for tool in allowed.tools}
    return choice or "auto", set(functions)


def _function(tool: FunctionTool) -> dict[str, Any]:
    schema = tool.function.parameters
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    elif not {"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"} & schema.keys():
        schema = {"type": "object", **schema}
    elif schema.get("type", "object") != "object":
        raise invalid("tools", f"{tool.function.name}: parameters must be the schema of an object")
    return {"name": tool.function.name, "schema": schema}


def _otherwise(
    wanted: ResponseFormat | None, is_forced: bool
) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    """What an answer without a call is."""
    if wanted is None or isinstance(wanted, TextFormat):
        return None if is_forced else TextFormat(type="text")
    if is_forced:
        raise invalid("response_format", "the answer is a call, as tool_choice says")
    if not isinstance(wanted, JsonObjectFormat | JsonSchemaFormat):
        raise invalid("response_format", "with tools must be text, json_object or json_schema")
    return wanted


# -------------------------------------------------------------------------------------------------
# Reads keyword arguments in Python's syntax as they come, and gives them as JSON.
#
# They are those that `server.constraints.tool_calls` allows: texts in double quotes with the
# escapes of JSON, so that nothing but names and the words for true, false and none differs from it.


WORDS = {"True": "true", "False": "false", "None": "null"}

_IN_TEXT = re.compile(r'(?:[^"\\]|\\.)+', re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
_OTHER = re.compile(r'[^"A-Za-z()\[\]{},]+')


class PythonReader:
    """Reads what is between the brackets of one call."""

    def __init__(self) -> None:
        self._held = ""
        self._num_arguments = self._depth = 0
        self._in_name, self._in_text = True, False
        #: Whether the bracket that ends the call was read.
        self.is_over = False

    def push(self, text: str) -> str:
        """The JSON that ``text`` adds."""
        self._held += text
        written = []
        while not self.is_over and self._held and (piece := self._next()) is not None:
            written.append(piece)
        return "".join(written)

    @property
    def rest(self) -> str:
        """What was pushed and is not read yet; behind the call where that is over."""
        return self._held

    def _next(self) -> str | None:
        """A piece of JSON; None where more must come first."""
        if self._in_name:
            return self._name()
        return self._text() if self._in_text else self._value()

    def _name(self) -> str | None:
        if self._held[0] == ")":
            return self._end()
        name, found, rest = self._held.lstrip(" ").partition("=")
        if not found:
            return None
        self._held, self._in_name = rest, False
        self._num_arguments += 1
        lead = ", " if self._num_arguments > 1 else "{"
        return f"{lead}{json.dumps(name, ensure_ascii=False)}: "

    def _text(self) -> str | None:
        if self._held[0] == '"':
            self._in_text = False
            return self._taken(1)
        found = _IN_TEXT.match(self._held)
        return None if found is None else self._taken(found.end())

    def _value(self) -> str | None:
        first = self._held[0]
        if first == ")":
            return self._end()
        if first == "," and not self._depth:
            self._held, self._in_name = self._held[1:], True
            return ""
        if first == '"':
            self._in_text = True
        self._depth += (first in "[{") - (first in "]}")
        if (word := _WORD.match(self._held)) is not None:
            if word.end() == len(self._held):
                return None
            self._taken(word.end())
            return WORDS.get(word[0], word[0])
        other = _OTHER.match(self._held)
        return self._taken(1 if other is None else other.end())

    def _end(self) -> str:
        self.is_over, self._held = True, self._held[1:]
        return "}" if self._num_arguments else "{}"

    def _taken(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken


class JsonReader:
    """Finds where one JSON value ends that comes in pieces: at a bracket which it did not open."""

    _MARKS = re.compile(r'\\.|["\\{}\[\]]', re.DOTALL)

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """The place of that bracket in ``text``, which follows what was given before."""
        begin = int(self._is_escaped and bool(text))
        self._is_escaped = self._is_escaped and not text
        for found in self._MARKS.finditer(text, begin):
            mark = found[0]
            if mark == "\\":  # the last character, and what it escapes comes with the next text
                self._is_escaped = True
            elif mark == '"':
                self._in_text = not self._in_text
            elif not self._in_text and len(mark) == 1:
                self._depth += 1 if mark in "[{" else -1
                if self._depth < 0:
                    return found.start()
        return None


# -------------------------------------------------------------------------------------------------
# Reads calls of functions from an answer as it comes, in any form of `model.chat`.


@dataclass(frozen=True, slots=True)
class Text:
    """More of an answer that is not a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of the function ``name``, the ``index``-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the ``index``-th call's arguments."""

    index: int
    text: str


Piece = Text | CallBegins | Arguments


class CallReader:
    """Reads one answer as it comes. What cannot be told yet is held back.

    Of an answer that was cut short, the last call's arguments are cut as well.
    """

    def __init__(self, form: CallForm = TAGGED) -> None:
        self._form = form
        self._held = ""
        self._read: Callable[[list[Piece]], bool] = self._begin
        self._num_calls = 0
        # Of the call and of the parameter that are being read, where each is written by itself.
        self._texts: Set[str] = frozenset()
        self._num_parameters = self._num_skipped = 0
        self._is_text = False
        self._python, self._json = PythonReader(), JsonReader()
        #: Whether all of the answer was calls, the last one complete.
        self.is_complete = False

    def push(self, text: str) -> list[Piece]:
        """What ``text`` adds."""
        self._held += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return pieces

    def end(self, is_whole: bool) -> list[Piece]:
        """What was held back and is not a call after all: only of an answer that was not cut."""
        was_undecided = self._read == self._begin
        return [Text(self._held)] if is_whole and was_undecided and self._held else []

    def _begin(self, pieces: list[Piece]) -> bool:
        """Before the first call, or any text."""
        begin = self._form.opening + self._form.begin
        if self._held.startswith(begin):
            self._read_after(begin, self._name)
            return True
        if not begin.startswith(self._held):
            self._read = self._text
            return True
        return False

    def _text(self, pieces: list[Piece]) -> bool:
        if self._held:
            pieces.append(Text(self._held))
            self._held = ""
        return False

    def _name(self, pieces: list[Piece]) -> bool:
        name, found, rest = self._held.partition(self._form.middle)
        if not found:
            return False
        pieces.append(CallBegins(self._num_calls, name))
        self._num_calls += 1
        self._texts, self._num_parameters = self._form.texts.get(name, frozenset()), 0
        self._held, self._python, self._json = rest, PythonReader(), JsonReader()
        if self._form.is_python:
            self._read = self._keywords
        else:
            self._read = self._arguments if self._form.parameter is None else self._parameter
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        """JSON, behind which a call ends with a bracket that is not the value's."""
        place = self._json.end_in(self._held)
        is_over = place is not None
        self._add(pieces, self._held[:place])
        self._held = self._held[place:] if is_over else ""
        if is_over:
            self._read = self._call_end
        return is_over

    def _call_end(self, pieces: list[Piece]) -> bool:
        is_there = self._held.startswith(self._form.end)
        if is_there:
            self._held = self._held.removeprefix(self._form.end)
            self._end_call()
        return is_there

    def _keywords(self, pieces: list[Piece]) -> bool:
        """Those of a call in Python's syntax, which a bracket outside of texts ends."""
        self._add(pieces, self._python.push(self._held))
        self._held = self._python.rest if self._python.is_over else ""
        if self._python.is_over:
            self._end_call()
        return self._python.is_over

    def _parameter(self, pieces: list[Piece]) -> bool:
        """Before a parameter, or the end of the call."""
        form, end = self._form.parameter, self._form.end
        assert form is not None
        if self._held.startswith(end):
            self._add(pieces, "}" if self._num_parameters else "{}")
            self._held = self._held.removeprefix(end)
            self._end_call()
            return True
        head, found, rest = self._held.partition(form.middle)
        if not found or not head.startswith(form.begin):
            return False
        name = head.removeprefix(form.begin)
        self._is_text = name in self._texts
        lead = ", " if self._num_parameters else "{"
        quote = '"' if self._is_text else ""
        self._add(pieces, f"{lead}{json.dumps(name, ensure_ascii=False)}: {quote}")
        self._num_parameters += 1
        self._held, self._read, self._num_skipped = rest, self._value, 1
        return True

    def _value(self, pieces: list[Piece]) -> bool:
        """Of a parameter, with the line break before it, which an empty text may share."""
        assert self._form.parameter is not None
        text, is_over = self._taken_until(self._form.parameter.end)
        if text:
            text, self._num_skipped = text[self._num_skipped :], 0
        if self._is_text:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        self._add(pieces, text + ('"' if is_over and self._is_text else ""))
        if is_over:
            self._read = self._parameter
        return is_over

    def _end_call(self) -> None:
        self._read, self.is_complete = self._between, not self._form.closing

    def _between(self, pieces: list[Piece]) -> bool:
        """Behind a call: another one, or the end of all."""
        begin, closing = self._form.between + self._form.begin, self._form.closing
        if self._held:
            self.is_complete = self._held == closing
        if self._held.startswith(begin):
            self._read_after(begin, self._name)
            return True
        return False

    def _taken_until(self, end: str) -> tuple[str, bool]:
        """Takes what is held before ``end``, and ``end`` if it is there: the text, and whether."""
        text, found, rest = self._held.partition(end)
        if not found:
            sizes = range(min(len(end) - 1, len(text)), 0, -1)
            keep = next((size for size in sizes if text.endswith(end[:size])), 0)
            text, rest = text[: len(text) - keep], text[len(text) - keep :]
        self._held = rest
        return text, bool(found)

    def _add(self, pieces: list[Piece], text: str) -> None:
        """More of the arguments."""
        if text:
            pieces.append(Arguments(self._num_calls - 1, text))

    def _read_after(self, after: str, read: Callable[[list[Piece]], bool]) -> None:
        self._held, self._read = self._held.removeprefix(after), read
