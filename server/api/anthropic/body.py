"""The bodies of `POST /v1/messages` and of counting its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.api.chat.messages import CACHE_MARK, MAX_MESSAGES, MAX_PARTS, NO_MEDIA, is_plain_json
from server.api.schemas.requests import MAX_STOP_CHARS, MAX_STOPS, Schema, TopK
from server.api.schemas.wire import History, ItemId, ModelName, Refusal, Wire

# -------------------------------------------------------------------------------------------------
# Blocks of a content. Those of images, documents and of tools that run on a server are refused by
# their type.


#: More than OpenAI's: an agent sends each of its tools with each request.
MAX_TOOLS = 512
MAX_DESCRIPTION_CHARS = 65_536

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class GivenText(Wire):
    """A text of the user, the system or a tool."""

    hints = CACHE_MARK | {"citations"}

    type: Literal["text"]
    text: str


class SaidText(History):
    """A text of the assistant's that is sent back."""

    hints = CACHE_MARK

    type: Literal["text"]
    text: str


class ThinkingBlock(History):
    """What the model has thought; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(History):
    """Thinking that another server has encrypted: nothing of it can be read."""

    hints = frozenset({"data"})

    type: Literal["redacted_thinking"]


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    if not is_plain_json(value):
        message = "must have at most 64 levels, whole characters, and numbers of 64 bits"
        raise PydanticCustomError("not_plain", message)
    return value


class ToolUseBlock(History):
    """A call that the model has made."""

    hints = CACHE_MARK

    type: Literal["tool_use"]
    id: ItemId
    name: ToolName
    input: Annotated[dict[str, Any], AfterValidator(_plain)]


def _among(*kinds: str) -> BeforeValidator:
    """Refuses blocks of other types, with their type."""

    def check(block: object) -> object:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            message = f"blocks of type {kind[:64]!r} are not supported here; {NO_MEDIA}"
            raise PydanticCustomError("other_type", "{message}", {"message": message})
        return block

    return BeforeValidator(check)


TextOnly = Annotated[GivenText, _among("text")]
Texts = Annotated[list[TextOnly], Field(fail_fast=True, max_length=MAX_PARTS)]


class ToolResult(Wire):
    """What a call has given. Whether it failed is for its text to say."""

    hints = CACHE_MARK | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: ItemId
    content: str | Texts | None = None


GivenBlock = Annotated[
    GivenText | ToolResult, Field(discriminator="type"), _among("text", "tool_result")
]
SaidBlock = Annotated[
    SaidText | ThinkingBlock | RedactedThinking | ToolUseBlock,
    Field(discriminator="type"),
    _among("text", "thinking", "redacted_thinking", "tool_use"),
]


class UserTurn(Wire):
    """What the user says, and what the calls of the turn before have given."""

    role: Literal["user"]
    content: str | Annotated[list[GivenBlock], Field(fail_fast=True, max_length=MAX_PARTS)]


class AssistantTurn(Wire):
    """What the model has said, or the beginning of what it is to say."""

    role: Literal["assistant"]
    content: str | Annotated[list[SaidBlock], Field(fail_fast=True, max_length=MAX_PARTS)]


class SystemTurn(Wire):
    """What the developer says between turns."""

    role: Literal["system"]
    content: str | Texts


AnthropicMessage = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


# -------------------------------------------------------------------------------------------------
# Tools, thinking and formats.


class ClientTool(Wire):
    """A function that the client runs; ``input_schema`` is the JSON schema of its arguments."""

    hints = CACHE_MARK | {
        *("strict", "eager_input_streaming", "defer_loading", "input_examples", "allowed_callers"),
    }

    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, StringConstraints(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    input_schema: Schema


class OtherTool(History):
    """A tool whose schema only Anthropic's models know, or that runs on its servers: left out."""

    type: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "client" if kind in (None, "custom") else "other"


Tool = Annotated[
    Annotated[ClientTool, Tag("client")] | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of_tool),
]


class AutoChoice(Wire):
    """The model may call; ``any``: it must."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class OneToolChoice(Wire):
    """The model must call this one."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(Wire):
    """The model may not call."""

    type: Literal["none"]


Choice = Annotated[AutoChoice | OneToolChoice | NoToolChoice, Field(discriminator="type")]

#: What of the thinking is shown: all, or nothing.
Display = Literal["summarized", "omitted"]


class ThinkingOn(Wire):
    """Think, in at most so many tokens."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, le=2**53)
    display: Display | None = None


class ThinkingAdaptive(Wire):
    """Think as much as the model does by itself."""

    type: Literal["adaptive", "between_tools"]
    display: Display | None = None


class ThinkingOff(Wire):
    """Answer at once."""

    type: Literal["disabled"]


ThinkingChoice = Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")]


class OutputSchema(Wire):
    """JSON that a schema admits."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Wire):
    """What the answer is to be, and how much the model is to think for it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


# -------------------------------------------------------------------------------------------------
# The bodies.


_REFUSED = {
    **dict.fromkeys(
        ["container", "mcp_servers"], Refusal("the server runs no code and no tools", ([],))
    ),
    "thread": Refusal("there are no threads; send the messages"),
    "stop": Refusal("is called stop_sequences here"),
    "n": Refusal("there is one answer", (1,)),
}

#: Known, and without effect on a server that one operator runs for a model of constant state.
_HARMLESS = CACHE_MARK | {
    *("metadata", "service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id"),
    *("diagnostics", "context_management", "compaction", "fallbacks", "billing_policy"),
    "fallback_credit_token",
}

StopSequence = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]


class CountBody(Wire):
    """`POST /v1/messages/count_tokens`: what `POST /v1/messages` would read."""

    refused: ClassVar[Mapping[str, Refusal]] = _REFUSED
    hints = _HARMLESS

    model: ModelName | None = None
    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: str | Texts | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None

    @model_validator(mode="after")
    def _one_format(self) -> CountBody:
        if self.output_format is not None and self.format is not self.output_format:
            raise PydanticCustomError("two_formats", "output_format is output_config.format")
        return self

    @property
    def format(self) -> OutputSchema | None:
        """By its name of today, or by that of the beta."""
        config = self.output_config
        return (config.format if config is not None else None) or self.output_format


class MessagesBody(CountBody):
    """`POST /v1/messages`; the seed is ours."""

    max_tokens: int = Field(ge=0, le=2**53)
    stop_sequences: (
        Annotated[list[StopSequence], Field(fail_fast=True, max_length=MAX_STOPS)] | None
    ) = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: TopK | None = None
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
