"""From Anthropic's body to the one form of a chat: turns to messages, tools, thinking, formats."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from model.chat.turns import Thinking
from server.api.anthropic.body import (
    AssistantTurn,
    AutoChoice,
    ClientTool,
    CountBody,
    MessagesBody,
    NoToolChoice,
    OneToolChoice,
    OtherTool,
    SaidText,
    SystemTurn,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingOn,
    ToolResult,
    ToolUseBlock,
    UserTurn,
)
from server.api.chat.answer_options import Effort
from server.api.chat.calls import ChosenFunction, NamedToolChoice, ToolChoice
from server.api.chat.messages import (
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    FunctionDefinition,
    FunctionTool,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from server.api.chat.prepare import Chat
from server.api.schemas.requests import Continuation, Drawing, JsonSchema, JsonSchemaFormat
from server.errors import invalid

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
    return [_plain(SystemTurn, texts)], is_billed


def _messages(turns: Iterable[UserTurn | AssistantTurn | SystemTurn]) -> Iterator[ChatMessage]:
    """Turns of one role that follow each other are one, as Anthropic's API has it."""
    said: list[str] = []
    role: type = UserTurn
    for turn in turns:
        if type(turn) is not role and said:
            yield _plain(role, said)
            said = []
        role = type(turn)
        if isinstance(turn, AssistantTurn):
            if turn.content:
                yield _answer(turn)
            continue
        for block in [turn.content] if isinstance(turn.content, str) else turn.content:
            if isinstance(block, ToolResult):
                if said:
                    yield _plain(role, said)
                    said = []
                yield _result(block)
            else:
                said.append(block if isinstance(block, str) else block.text)
    if said:
        yield _plain(role, said)


def _plain(role: type, texts: Sequence[str]) -> ChatMessage:
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
