"""Calls of a client's functions: what is asked of the model, and what it has called.

Every call is written under a grammar, so that its arguments follow the function's
schema. See `model.chat.call_forms` for how it looks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from model.chat.call_forms import TAGGED, CallForm
from model.chat.template import ChatTemplate
from server.api.openai.chat.messages import FunctionName, FunctionTool, tool_object
from server.api.schemas.formats import (
    FormatPart,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
)
from server.api.schemas.wire import Wire, of_type
from server.constraints.tool_parameters import texts_of
from server.errors import invalid

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
