"""Messages and tools of a chat: as OpenAI's clients send them, and as templates read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from server.api.schemas.requests import Schema, few_fields, finite_numbers
from server.api.schemas.wire import History, Refusal, Wire, of_type
from server.api.schemas.wire import ItemId as CallId

NO_MEDIA = "the model reads and writes text alone"

Tool = TypeVar("Tool")

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOLS = 128
MAX_CALLS = 128

#: Levels of JSON that a template gets.
MAX_DEPTH = 64

#: Excludes what could be mistaken for a template's own marks.
NAME = r"^[^\s\x00-\x1f\x7f-\x9f<|\\/>]+$"
Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=NAME)]
#: Of a function.
Description = Annotated[str, StringConstraints(max_length=16_384)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


#: Of a message of the assistant's that is sent back.
ASSISTANT = {
    "audio": Refusal(NO_MEDIA),
    "function_call": Refusal("is what tool_calls was called before"),
}

#: A mark for other servers' caches: the prefix cache finds beginnings by itself.
CACHE_MARK = frozenset(["cache_control"])


class TextPart(Wire):
    """A part of a content; only text is supported."""

    hints = CACHE_MARK

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: object) -> object:
        return of_type("text", value, "parts of type {} are not supported; this model reads text")


class HeldText(TextPart):
    """A part of what is sent back."""

    model_config = ConfigDict(extra="ignore")


class HeldRefusal(History):
    """A refusal that is sent back; it is text to the model."""

    type: Literal["refusal"]
    refusal: str


def _kind_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "refusal" if kind == "refusal" else "text"


HeldPart = Annotated[
    Annotated[HeldText, Tag("text")] | Annotated[HeldRefusal, Tag("refusal")],
    Discriminator(_kind_of_part),
]

Content = str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
ToolContent = (
    str | Annotated[list[HeldText], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
)
Said = str | Annotated[list[HeldPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class SystemMessage(Wire):
    """What the developer of an application says."""

    hints = CACHE_MARK | {"id"}

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Wire):
    """What its user says."""

    hints = CACHE_MARK | {"id"}

    role: Literal["user"]
    content: Content
    name: Name | None = None


class CalledFunction(History):
    """What was called; ``arguments`` is JSON, in a text, or what there was of it."""

    name: FunctionName
    arguments: str | None


class ToolCall(History):
    """A call that the model has made."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(History):
    """What the model has said or called, as a client holds the answer to its request."""

    refused = ASSISTANT

    role: Literal["assistant"]
    content: Said | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        """Or names a field that it could be in: an answer may have ended before its first word."""
        if not self.model_fields_set & {"content", "reasoning_content", "refusal", "tool_calls"}:
            raise PydanticCustomError("empty", "an assistant's message needs content or tool_calls")
        return self


class ToolMessage(History):
    """What a call has given."""

    role: Literal["tool"]
    content: ToolContent
    tool_call_id: CallId
    name: Name | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
Messages = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


class FunctionDefinition(Wire):
    """A function that the model may call; ``parameters`` is a JSON schema of an object."""

    hints = CACHE_MARK

    name: FunctionName
    description: Description | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class FunctionTool(Wire):
    """A tool; only functions are supported."""

    hints = CACHE_MARK

    type: Literal["function"]
    function: FunctionDefinition


#: Of a tool that is left out; longer and stranger ones are refused.
_TOOL_TYPE = re.compile(r"[a-z][a-z0-9_.-]{0,63}", re.ASCII)


def functions_alone(stand_in: Tool) -> tuple[BeforeValidator, AfterValidator]:
    """Leaves tools out that are no functions: other servers run them themselves.

    The head of the answer lists them, as `Wire` does with hints. Meanwhile ``stand_in`` has their
    places in the list, so that errors have the client's numbers.
    """

    def marked(tools: object, info: ValidationInfo) -> object:
        if not isinstance(tools, list):
            return tools
        others = [_other_type(tool) for tool in tools]
        if isinstance(info.context, set):
            info.context.update(f"tools.{kind}" for kind in others if kind)
        return [stand_in if kind else tool for kind, tool in zip(others, tools, strict=True)]

    def kept(tools: list[Tool]) -> list[Tool]:
        return [tool for tool in tools if tool is not stand_in]

    return BeforeValidator(marked), AfterValidator(kept)


def _other_type(tool: object) -> str | None:
    """The type of a tool that is no function."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    is_other = isinstance(kind, str) and kind != "function" and _TOOL_TYPE.fullmatch(kind)
    return kind if is_other else None


Tools = Annotated[
    list[FunctionTool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    *functions_alone(FunctionTool.model_construct()),
]

#: More variables for a template.
TemplateKwargs = Annotated[
    dict[str, Any], BeforeValidator(few_fields), AfterValidator(finite_numbers)
]


def text_of(content: Content | ToolContent | Said | None) -> str:
    """The text of a content; parts become lines."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(map(_text_of_part, content))


def _text_of_part(part: TextPart | HeldRefusal) -> str:
    return part.refusal if isinstance(part, HeldRefusal) else part.text


#: What a part costs besides its text, as characters.
_PART_CHARS = 16


def num_chars(message: ChatMessage) -> float:
    """Characters of all texts of ``message``; infinite where it has calls."""
    if isinstance(message, AssistantMessage) and message.tool_calls:
        return math.inf
    num = 0
    for value in vars(message).values():
        if isinstance(value, str):
            num += len(value)
        elif isinstance(value, list):
            num += sum(_PART_CHARS + len(_text_of_part(part)) for part in value)
    return num


def arguments_of(call: ToolCall) -> object:
    """The object that a call was given; of one that was cut, what there is of it.

    An empty object where there is nothing, or null; the text where that is no object.
    """
    text = call.function.arguments or ""
    try:
        found = from_json(text, allow_partial="trailing-strings") if text.strip() else None
    except ValueError:
        return text
    if found is None:
        return {}
    return found if isinstance(found, dict) and _is_shallow(found) else text


def is_plain_json(value: object) -> bool:
    """Whether a value parsed from JSON can be used: not deep, whole characters, 64-bit numbers."""
    try:
        return _is_shallow(value) and bool(orjson.dumps(value))
    except TypeError:
        return False


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level for inner in _inside(item)]
    return not level


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def tool_object(tool: FunctionTool) -> dict[str, Any]:
    """A tool as a template reads it: what the client gave, and nothing else."""
    return tool.model_dump(exclude_unset=True)
