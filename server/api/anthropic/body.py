"""The bodies of Anthropic's API, and the one form of a chat that they become."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import orjson
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

from model.chat import Thinking
from server.api.chat.calls import ChosenFunction, NamedToolChoice, ToolChoice
from server.api.chat.messages import (
    CACHE_MARK,
    MAX_MESSAGES,
    MAX_PARTS,
    NO_MEDIA,
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    FunctionDefinition,
    FunctionTool,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    is_plain_json,
)
from server.api.chat.prepare import Chat, Effort
from server.api.schemas.requests import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    Continuation,
    Drawing,
    JsonSchema,
    JsonSchemaFormat,
    Schema,
    TopK,
)
from server.api.schemas.wire import History, ItemId, ModelName, Refusal, Wire
from server.errors import invalid

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


#: How Claude Code begins the first text of the system: the line differs from request to request,
#: so that no two prompts would begin in the same way.
BILLING = "x-anthropic-billing-header:"

#: What fields of the engine and of chats are called here.
NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}


@dataclass(frozen=True, slots=True)
class Translated:
    """A body as a chat; the fields ``ignored`` have no effect.

    ``shows_thoughts``: what the model thinks is in the answer.
    """

    chat: Chat
    ignored: Sequence[str]
    shows_thoughts: bool


def translated(
    body: CountBody, wanted: Continuation, thinking: Thinking | None = None
) -> Translated:
    """The chat of ``body``, for a model that thinks as ``thinking`` says.

    Raises `InvalidRequest` where no turn says anything.
    """
    ignored: list[str] = []
    system, is_billed = _system(body)
    if is_billed:
        ignored.append(BILLING.rstrip(":"))
    tools = list(_tools(body, ignored))
    effort, variables = _thinking(body, thinking, ignored)
    choice, parallel = _choice(body)
    turns = list(_messages(body.messages))
    if not turns:
        raise invalid("messages", "must have a text")
    is_prefilled = isinstance(turns[-1], AssistantMessage) and not turns[-1].tool_calls
    chat = Chat(
        id=f"msg_{secrets.token_hex(16)}",
        messages=[*system, *turns],
        drawing=_drawing(body),
        wanted=wanted,
        tools=tools,
        tool_choice=choice if tools else None,
        parallel_tool_calls=parallel,
        response_format=_format(body),
        max_tokens=body.max_tokens if isinstance(body, MessagesBody) else None,
        effort=effort,
        effort_field="thinking",
        max_thinking_tokens=getattr(body.thinking, "budget_tokens", None),
        template_kwargs=variables,
        continue_final_message=is_prefilled,
        names=NAMES,
    )
    shown = getattr(body.thinking, "display", None) != "omitted"
    return Translated(chat, ignored, shown)


# -------------------------------------------------------------------------------------------------
# Messages.


def _system(body: CountBody) -> tuple[list[ChatMessage], bool]:
    """The system's message, if there is any text, and whether a line of billing was left out."""
    if body.system is None:
        return [], False
    given = [body.system] if isinstance(body.system, str) else [each.text for each in body.system]
    is_billed = bool(given) and given[0].startswith(BILLING)
    if is_billed:
        given[0] = given[0].partition("\n")[2].lstrip("\n")
    texts = [text for text in given if text]
    if not texts:
        return [], is_billed
    return [_said(SystemTurn, texts)], is_billed


def _messages(turns: Iterable[UserTurn | AssistantTurn | SystemTurn]) -> Iterator[ChatMessage]:
    """Turns of one role that follow each other are one, as Anthropic's API has it."""
    said: list[str] = []
    role: type = UserTurn
    for turn in turns:
        if type(turn) is not role and said:
            yield _said(role, said)
            said = []
        role = type(turn)
        if isinstance(turn, AssistantTurn):
            if turn.content:
                yield _answer(turn)
            continue
        for block in [turn.content] if isinstance(turn.content, str) else turn.content:
            if isinstance(block, ToolResult):
                if said:
                    yield _said(role, said)
                    said = []
                yield _result(block)
            else:
                said.append(block if isinstance(block, str) else block.text)
    if said:
        yield _said(role, said)


def _said(role: type, texts: Sequence[str]) -> ChatMessage:
    """A message of texts, which become lines."""
    content = "\n".join(texts)
    if role is SystemTurn:
        return SystemMessage(role="system", content=content)
    return UserMessage(role="user", content=content)


def _answer(turn: AssistantTurn) -> ChatMessage:
    if isinstance(turn.content, str):
        return AssistantMessage(role="assistant", content=turn.content)
    texts = [block.text for block in turn.content if isinstance(block, SaidText)]
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in turn.content if isinstance(block, ToolUseBlock)]
    return AssistantMessage.model_construct(
        role="assistant",
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _call(block: ToolUseBlock) -> ToolCall:
    function = CalledFunction.model_construct(
        name=block.name, arguments=orjson.dumps(block.input).decode()
    )
    return ToolCall.model_construct(id=block.id, type="function", function=function)


def _result(block: ToolResult) -> ChatMessage:
    content = block.content
    if content is None or isinstance(content, str):
        texts = [content or ""]
    else:
        texts = [part.text for part in content]
    return ToolMessage(role="tool", content="\n".join(texts), tool_call_id=block.tool_use_id)


# -------------------------------------------------------------------------------------------------
# Tools, thinking, formats, sampling.


def _tools(body: CountBody, ignored: list[str]) -> Iterator[FunctionTool]:
    for tool in body.tools or ():
        if isinstance(tool, OtherTool):
            ignored.append(f"tools.{tool.type}")
            continue
        assert isinstance(tool, ClientTool)
        function = FunctionDefinition.model_construct(
            _fields_set={"name", "parameters"} | ({"description"} if tool.description else set()),
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
        )
        yield FunctionTool.model_construct(
            _fields_set={"type", "function"}, type="function", function=function
        )


def _choice(body: CountBody) -> tuple[ToolChoice | None, bool | None]:
    """Which tool must be called, and whether several calls may be made."""
    choice = body.tool_choice
    if choice is None:
        return None, None
    if isinstance(choice, NoToolChoice):
        return "none", None
    parallel = None if choice.disable_parallel_tool_use is None else False
    if choice.disable_parallel_tool_use is False:
        parallel = True
    if isinstance(choice, OneToolChoice):
        function = ChosenFunction.model_construct(name=choice.name)
        return NamedToolChoice.model_construct(type="function", function=function), parallel
    assert isinstance(choice, AutoChoice)
    return ("required" if choice.type == "any" else "auto"), parallel


def _thinking(
    body: CountBody, thinking: Thinking | None, ignored: list[str]
) -> tuple[Effort | None, dict[str, Any]]:
    """How much to think, and the template's variable that turns it on without a level.

    Not at all where the body does not ask for it.
    """
    level = None if body.output_config is None else body.output_config.effort
    is_on = isinstance(body.thinking, ThinkingOn | ThinkingAdaptive)
    if thinking is None:
        ignored += ["thinking"] * is_on + ["output_config.effort"] * (level is not None)
        return None, {}
    effort: Effort | None = "xhigh" if level == "max" else level
    if effort is not None and is_on and effort in thinking.efforts:
        return effort, {}
    ignored += ["output_config.effort"] * (level is not None)
    if not is_on:
        return "none", {}
    return None, {switch.name: switch.on for switch in thinking.switches[:1]}


def _format(body: CountBody) -> JsonSchemaFormat | None:
    if body.format is None:
        return None
    schema = JsonSchema(name="answer", schema=body.format.schema_, description=None)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def _drawing(body: CountBody) -> Drawing:
    if not isinstance(body, MessagesBody):
        return Drawing.model_construct()
    return Drawing.model_construct(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=body.stop_sequences,
    )
