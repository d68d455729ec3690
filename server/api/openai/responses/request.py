"""What a body says of the answer: sampling, format and tools, and what is echoed of it."""

from __future__ import annotations

import time

from server.api.openai.chat.messages import FunctionDefinition, FunctionTool
from server.api.openai.chat.reasoning import Effort
from server.api.openai.chat.tools import (
    AllowedFunction,
    AllowedFunctions,
    AllowedToolChoice,
    ChosenFunction,
    NamedToolChoice,
    ToolChoice,
    ToolUse,
    tool_use,
)
from server.api.openai.responses.note import Json
from server.api.openai.responses.schemas import (
    LOGPROBS,
    NamedSchema,
    ResponseAllowedTools,
    ResponsesBody,
    ResponseToolChoice,
)
from server.api.openai.responses.schemas import ToolChoice as ResponseToolChoiceField
from server.api.schemas.formats import JsonSchema, JsonSchemaFormat, ResponseFormat
from server.api.translate import renamed
from server.engine.sampling_defaults import DEFAULTS
from server.errors import InvalidRequest, invalid
from server.models.service import Service


def check(body: ResponsesBody) -> None:
    """Raises `InvalidRequest` for fields that do not go together."""
    if body.state is not None and body.previous_response_id is not None:
        raise invalid("state", "is what a conversation begins with: that one has begun")
    if body.background and body.store is False:
        raise invalid("background", "needs store to be true")
    if body.idempotency_key is not None and body.store is False:
        raise invalid("idempotency_key", "needs store to be true")
    if body.top_logprobs and not wants_logprobs(body):
        raise invalid("top_logprobs", "needs include to have message.output_text.logprobs")


def effort_of(body: ResponsesBody) -> Effort | None:
    """How much the model is to think; None where the body does not say."""
    return None if body.reasoning is None else body.reasoning.effort


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the output is to show them."""
    return LOGPROBS in (body.include or ())


def _chat_tools(body: ResponsesBody) -> list[FunctionTool]:
    """Tools as chats and their templates have them."""
    return [
        FunctionTool(
            type="function",
            function=FunctionDefinition(**tool.model_dump(exclude={"type"}, exclude_unset=True)),
        )
        for tool in body.tools or ()
    ]


def tools_of(service: Service, body: ResponsesBody) -> ToolUse:
    """What tools and format come to. Raises `InvalidRequest` where they do not go together."""
    tools, choice = _chat_tools(body), body.tool_choice
    chosen = _chat_choice(choice)
    return tool_use(tools, chosen, body.parallel_tool_calls, _format(body), service.chat_template)


def _chat_choice(choice: ResponseToolChoiceField | None) -> ToolChoice:
    """``choice`` as chats have it."""
    if isinstance(choice, ResponseToolChoice):
        return NamedToolChoice(type="function", function=ChosenFunction(name=choice.name))
    if isinstance(choice, ResponseAllowedTools):
        names = [ChosenFunction(name=tool.name) for tool in choice.tools]
        tools = [AllowedFunction(type="function", function=name) for name in names]
        allowed = AllowedFunctions(mode=choice.mode, tools=tools)
        return AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
    return choice or "auto"


def _format(body: ResponsesBody) -> ResponseFormat | None:
    """The format as chats have it."""
    wanted = body.text.format if body.text is not None else None
    if not isinstance(wanted, NamedSchema):
        return wanted
    schema = JsonSchema(**wanted.model_dump(exclude={"type"}, exclude_unset=True))
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


#: The names that fields of the engine and of chats have here; calls of tools are a format, too.
_OURS = {
    "response_format": "text",
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
}


def in_our_words(error: InvalidRequest, body: ResponsesBody) -> InvalidRequest:
    """``error`` with the names that the fields have here."""
    is_format = body.text is not None and body.text.format is not None
    return renamed(error, _OURS if is_format else {**_OURS, "response_format": "tools"})


def echoed_fields(service: Service, body: ResponsesBody, limit: int, seed: int) -> Json:
    """What of the response object never changes."""
    given = body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)

    def echo(*names: str) -> Json:
        return {name: given.get(name) for name in names}

    named = echo("instructions", "previous_response_id", "prompt_cache_key", "safety_identifier")
    return {
        "created_at": int(time.time()),
        "model": service.model.name,
        "max_tool_calls": None,
        "service_tier": "default",
        **named,
        "background": bool(body.background),
        "store": body.store is not False,
        "max_output_tokens": limit,
        "metadata": given.get("metadata", {}),
        "reasoning": {"effort": effort_of(body), "summary": None},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": given.get("temperature", DEFAULTS.temperature),
        "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": given.get("top_p", DEFAULTS.top_p),
        "truncation": given.get("truncation", "disabled"),
        "user": given.get("user"),
        "seed": seed,
    }
