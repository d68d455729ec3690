"""Messages to token ids, by the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.chat.call_forms import LISTED
from model.chat.python_calls import written
from server.api.openai.chat.boundaries import MIN_TOKENS, places, shared_texts
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
from server.chat.marks import Marks
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
    template, names = service.chat_template, service.tokenizer.special_ids
    source = template.of(bool(tools))
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    given = dict(template_kwargs or {})
    if not is_plain_json(given):
        raise invalid(
            "chat_template_kwargs", f"must have {MAX_DEPTH} levels and 64-bit numbers at most"
        )
    for name in given:
        if name in RESERVED:
            raise invalid("chat_template_kwargs", f"{name!r} is the server's")
    if continue_final_message and (add_generation_prompt or not text_of(messages[-1].content)):
        raise invalid(
            "continue_final_message",
            "needs a last message with content, and add_generation_prompt to be false",
        )
    plain = [_plain(message, "developer" in source) for message in messages]
    described = [tool_object(tool) for tool in tools or ()]
    marks = Marks(names, source, plain, described, given)
    rendered: list[Mapping[str, Any]] = [_marked(message, marks) for message in plain]
    if "tool_calls" not in source and template.calls == LISTED:
        rendered = [_with_calls(message) for message in rendered]
    variables = {
        **template.special_tokens,
        **{name: marks.all_of(value) for name, value in given.items()},
        "tools": marks.all_of(described) if described else None,
    }

    async def render(messages: Sequence[Mapping[str, Any]], opens_answer: bool) -> str:
        more = {"add_generation_prompt": opens_answer}
        return await _rendered(service, source, messages, variables | more)

    try:
        text = await render(rendered, add_generation_prompt)
    except InvalidRequest as error:
        raise InvalidRequest(marks.without(error.message), error.param) from None
    if continue_final_message:
        text = _left_open(text, rendered[-1]["content"])
    tokenizer = service.tokenizer if owner is None else service.tokenizers.of(owner)
    ids = await asyncio.to_thread(lambda: TokenArray(marks.ids(text, tokenizer)))
    cache_at: tuple[int, ...] = ()
    if owner is not None and len(ids) > MIN_TOKENS:
        others = await shared_texts(render, rendered, bool(tools))
        cache_at = await asyncio.to_thread(places, ids, text, others, marks, tokenizer)
    return Prompt(ids, text[-END_CHARS:], cache_at)


async def _rendered(
    service: Service,
    source: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """What ``source`` makes of ``messages``; arguments that are text may be too much for it."""
    try:
        return await service.renderer.render(source, {**variables, "messages": messages})
    except InvalidRequest:
        objects = [_with_objects(message) for message in messages]
        if objects == messages:
            raise
        return await service.renderer.render(source, {**variables, "messages": objects})


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


def _marked(message: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
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


def _left_open(text: str, content: str) -> str:
    """``text`` up to the end of the last message's ``content``."""
    core = content.strip()
    place = text.rfind(core)
    if not core or place < 0:
        raise invalid("continue_final_message", "the chat template does not write it as it is")
    # Spaces at its end are the client's, where the template has left them.
    end = place + len(core)
    tail = content[content.rindex(core) + len(core) :]
    return text[: end + len(tail)] if text.startswith(tail, end) else text[:end]
