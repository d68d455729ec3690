"""Messages to token ids, by the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.chat.call_forms import LISTED
from model.chat.python_calls import written
from server.api.openai.chat.boundaries import continuations, places
from server.api.openai.chat.messages import (
    MAX_DEPTH,
    AssistantMessage,
    ChatMessage,
    FunctionTool,
    ToolMessage,
    arguments_of,
    is_plain_json,
    text_of,
    tool_object,
)
from server.chat.marks import Marks, parted
from server.chat.renderer import Rendered
from server.engine.token_ids import TokenArray
from server.errors import InvalidRequest, invalid
from server.models.service import Service

#: What a template gets from the server, so that a client cannot give it.
RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


#: Of a prompt's text, what shows whether it ends within thinking.
END_CHARS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """``ids`` are the tokens of a prompt, ``end`` the last characters of its text.

    The conversation's next prompt begins with ``cache_at`` of the tokens.
    """

    ids: Sequence[int]
    end: str
    cache_at: tuple[int, ...] = ()


async def prompt_of(
    service: Service,
    messages: Sequence[ChatMessage],
    tools: Sequence[FunctionTool] | None = None,
    add_generation_prompt: bool | None = None,
    *,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    owner: str | None = None,
) -> Prompt:
    """What the template writes of ``messages``, to generate the next one from.

    With ``continue_final_message`` the last one is left open, to continue with it; else it
    is followed by what begins the next one, unless ``add_generation_prompt`` is false.
    ``template_kwargs`` are more variables for the template. An ``owner`` will send the messages
    again with more: the ids are remembered, and the prompt knows its ``cache_at``. Raises
    `InvalidRequest` with what the template says.
    """
    source = service.chat_template.of(bool(tools))
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if continue_final_message and (add_generation_prompt or not text_of(messages[-1].content)):
        raise invalid(
            "continue_final_message",
            "needs a last message with content, and add_generation_prompt to be false",
        )
    given = await asyncio.to_thread(
        _template_input, service, source, messages, tools or (), template_kwargs or {}
    )
    marks, said = given.marks, [*given.messages]
    if continue_final_message:
        said[-1] = _with_end(said[-1], marks.end)
    variables = {
        **given.variables,
        "messages": said,
        "add_generation_prompt": add_generation_prompt,
    }
    others = continuations(said, bool(tools)) if owner is not None else ()
    try:
        rendered = await _rendered(service, source, variables, others, owner or "")
    except InvalidRequest as error:
        raise InvalidRequest(marks.without(error.message), error.param) from None
    if continue_final_message:
        rendered = _left_open(rendered, given.messages[-1]["content"], marks.end)
    text = rendered.text
    tokenizer = service.tokenizer if owner is None else service.tokenizers.of(owner)

    def encoded() -> tuple[TokenArray, tuple[int, ...]]:
        ids = TokenArray(marks.ids(text, tokenizer))
        return ids, places(ids, text, rendered.shared, marks, tokenizer)

    ids, cache_at = await asyncio.to_thread(encoded)
    return Prompt(ids, text[-END_CHARS:], cache_at)


@dataclass(frozen=True, slots=True)
class _TemplateInput:
    """What a template gets of a request, marked: ``messages``, and other ``variables``."""

    marks: Marks
    messages: list[Mapping[str, Any]]
    variables: dict[str, Any]


def _template_input(
    service: Service,
    source: str,
    messages: Sequence[ChatMessage],
    tools: Sequence[FunctionTool],
    given: Mapping[str, Any],
) -> _TemplateInput:
    """For a thread: it goes through every text and value that the client gave."""
    template = service.chat_template
    if not is_plain_json(dict(given)):
        raise invalid(
            "chat_template_kwargs", f"must have {MAX_DEPTH} levels and 64-bit numbers at most"
        )
    for name in given:
        if name in RESERVED:
            raise invalid("chat_template_kwargs", f"{name!r} is the server's")
    plain = [_plain(message, "developer" in source) for message in messages]
    described = [tool_object(tool) for tool in tools]
    marks = Marks(service.tokenizer.special_ids, source, plain, described, given)
    said: list[Mapping[str, Any]] = [_marked_message(message, marks) for message in plain]
    if "tool_calls" not in source and template.calls == LISTED:
        said = [_with_calls(message) for message in said]
    variables = {
        **template.special_tokens,
        **{name: marks.all_of(value) for name, value in given.items()},
        "tools": marks.all_of(described) if described else None,
    }
    return _TemplateInput(marks, said, variables)


async def _rendered(
    service: Service,
    source: str,
    variables: Mapping[str, Any],
    others: Sequence[Mapping[str, object]],
    owner: str,
) -> Rendered:
    """What ``source`` makes of ``variables``; arguments that are text may be too much for it."""
    try:
        return await service.renderer.render(source, variables, others, owner)
    except InvalidRequest:
        messages = variables["messages"]
        objects = [_with_objects(message) for message in messages]
        if objects == messages:
            raise
        variables = {**variables, "messages": objects}
        return await service.renderer.render(source, variables, others, owner)


def _plain(message: ChatMessage, knows_developer: bool) -> dict[str, Any]:
    """A message as templates read them. Most know no developer: to these it is the system."""
    role: str = message.role
    if role == "developer" and not knows_developer:
        role = "system"
    found: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage):
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.reasoning_content is not None:
            found["reasoning_content"] = message.reasoning_content
        if not message.content and message.refusal is not None:
            found["content"] = message.refusal
        if message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": arguments_of(call)},
                }
                for call in message.tool_calls
            ]
    return found


def _marked_message(message: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
    return {
        name: marks.content(value) if name == "content" else marks.all_of(value)
        for name, value in message.items()
    }


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A marked message with its calls in its content, for templates that read no ``tool_calls``."""
    if "tool_calls" not in message:
        return message
    return {**message, "content": message["content"] + written(message["tool_calls"])}


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message for templates that read the items of arguments: those that are text have none."""
    calls = [
        call
        if isinstance(call["function"]["arguments"], Mapping)
        else {**call, "function": {**call["function"], "arguments": {}}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _with_end(message: Mapping[str, Any], end: str) -> Mapping[str, Any]:
    """``message`` with ``end`` behind the last word of its content."""
    before, core, after = parted(message["content"])
    return {**message, "content": before + core + end + after}


def _left_open(rendered: Rendered, content: str, end: str) -> Rendered:
    """``rendered`` up to ``end``, which was put behind the last message's ``content``."""
    _, core, after = parted(content)
    head, found, tail = rendered.text.rpartition(end)
    if not found or not core or not head.endswith(core):
        raise invalid("continue_final_message", "the chat template does not write it as it is")
    # Spaces at its end are the client's, where the template has left them.
    num_left = len(after) if tail.startswith(after) else 0
    shared: list[tuple[int, str]] = []
    for num_same, ahead in rendered.shared:
        if (behind := num_same - len(head) - len(end)) < 0:
            shared.append((num_same, ahead))
        else:
            same = min(behind, num_left)
            shared.append((len(head) + same, (tail[:behind] + ahead)[same:]))
    return Rendered(head + tail[:num_left], shared)
