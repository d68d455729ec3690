"""OpenAI's messages and tools, as they come over the wire and as templates read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from server.api.formats import Schema, few_fields, finite_numbers
from server.api.names import ItemId as CallId
from server.api.wire import Wire

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOLS = 128
MAX_CALLS = 128

#: Levels of JSON that a template gets.
MAX_DEPTH = 64

#: Nothing that could be mistaken for a template's own marks.
NAME = r"^[^\s\x00-\x1f\x7f-\x9f<|\\/>]+$"
Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=NAME)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(Wire):
    """A part of a content; there is none but text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            message = f"parts of type {kind[:64]!r} are not supported; this model reads text"
            raise PydanticCustomError("part_type", "{message}", {"message": message})
        return value


Content = str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]


class SystemMessage(Wire):
    """What the developer of an application says."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Wire):
    """What its user says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class CalledFunction(Wire):
    """What was called; ``arguments`` is JSON, in a text."""

    name: FunctionName
    arguments: str


class ToolCall(Wire):
    """A call that the model has made."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Wire):
    """What the model has said or called, as `POST /v1/chat/completions` answers it."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise PydanticCustomError("empty", "an assistant's message needs content or tool_calls")
        return self


class ToolMessage(Wire):
    """What a call has given."""

    role: Literal["tool"]
    content: Content
    tool_call_id: CallId


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
Messages = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


class FunctionDefinition(Wire):
    """A function that the model may call; ``parameters`` is a JSON schema of an object."""

    name: FunctionName
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class FunctionTool(Wire):
    """A tool; there is none but functions."""

    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)]

#: More variables for a template.
TemplateKwargs = Annotated[
    dict[str, Any], BeforeValidator(few_fields), AfterValidator(finite_numbers)
]


def text_of(content: Content | None) -> str:
    """The text of a content; parts become lines."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def arguments_of(call: ToolCall) -> object:
    """The object that a call was given, or its text where that is none."""
    try:
        found = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
    return found if isinstance(found, dict) and is_tame(found) else call.function.arguments


def is_tame(value: object) -> bool:
    """Whether what came as JSON can go on as such: not deep, whole characters, 64-bit numbers."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level for inner in _inside(item)]
    try:
        return not level and bool(orjson.dumps(value))
    except TypeError:
        return False


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def tool_object(tool: FunctionTool) -> dict[str, Any]:
    """A tool as a template reads it: what the client gave, and nothing else."""
    return tool.model_dump(exclude_unset=True)
