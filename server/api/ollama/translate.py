"""From Ollama's bodies to the one form of a chat: messages, options, thinking, formats."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from server.api.chat.answer_options import USUAL, Effort
from server.api.chat.messages import (
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from server.api.chat.prepare import Chat
from server.api.ollama.body import (
    Format,
    GenerateBody,
    GeneratingBody,
    OllamaChatBody,
    OllamaMessage,
    OllamaOptions,
)
from server.api.schemas.requests import (
    Continuation,
    Drawing,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    Sampling,
)
from server.errors import invalid
from server.models.service import Service

#: What fields of the engine and of chats are called here.
NAMES = {
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in ("stop", "top_k", "logit_bias", "repeat_last_n")},
}


def new_id() -> str:
    """Of a request; Ollama's answers have none."""
    return f"ollama-{secrets.token_hex(16)}"


def chat_of(service: Service, body: OllamaChatBody, wanted: Continuation) -> Chat:
    """The chat of a body that has messages."""
    return _chat(service, body, wanted, list(_messages(body.messages or ())), body.tools)


def chat_of_prompt(service: Service, body: GenerateBody, wanted: Continuation) -> Chat:
    """The chat of one prompt, in the model's template."""
    messages: list[ChatMessage] = []
    if body.system:
        messages.append(SystemMessage(role="system", content=body.system))
    messages.append(UserMessage(role="user", content=body.prompt or ""))
    return _chat(service, body, wanted, messages, None)


def _chat(
    service: Service,
    body: GeneratingBody,
    wanted: Continuation,
    messages: Sequence[ChatMessage],
    tools: Any,
) -> Chat:
    effort, variables = _thinking(service, body)
    last = messages[-1]
    return Chat(
        id=new_id(),
        messages=messages,
        drawing=drawing_of(body.options),
        wanted=wanted,
        tools=tools,
        response_format=format_of(body.format),
        max_tokens=None if body.options is None else body.options.num_predict,
        effort=effort,
        effort_field="think",
        template_kwargs=variables,
        continue_final_message=isinstance(last, AssistantMessage) and not last.tool_calls,
        names=NAMES,
    )


def drawing_of(options: OllamaOptions | None) -> Drawing:
    """How tokens are drawn."""
    if options is None:
        return Drawing.model_construct()
    given: dict[str, Any] = {name: getattr(options, name) for name in Drawing.model_fields}
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    return Drawing.model_construct(**given)


def sampling_of_raw(body: GenerateBody) -> Sampling:
    """How tokens are drawn after a prompt that no template is applied to."""
    drawing = drawing_of(body.options)
    return Sampling.model_construct(
        **{name: getattr(drawing, name) for name in Drawing.model_fields},
        max_tokens=None if body.options is None else body.options.num_predict,
        response_format=format_of(body.format),
    )


def format_of(wanted: Format | None) -> ResponseFormat | None:
    """OpenAI's form of a format."""
    if not isinstance(wanted, dict):
        return JsonObjectFormat(type="json_object") if wanted == "json" else None
    schema = JsonSchema(name="format", schema=wanted, description=None)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def _thinking(service: Service, body: GeneratingBody) -> tuple[Effort | None, Mapping[str, Any]]:
    """How much to think, and the variable of the template that turns it on without a level."""
    think, thinking = body.think, service.chat_template.thinking
    if think is None:
        return None, {}
    if think is False:
        return "none", {}
    if thinking is None:
        raise invalid("think", "is not supported: the model does not think apart from its answer")
    if isinstance(think, str) and (thinking.efforts or think == USUAL):
        return think, {}
    return None, {switch.name: switch.on for switch in thinking.switches[:1]}


def _messages(given: Sequence[OllamaMessage]) -> Iterator[ChatMessage]:
    """Calls without an id are numbered; a tool's message answers the first open one of its name."""
    num_calls, unanswered = 0, list[ToolCall]()
    for message in given:
        content = message.content or ""
        if message.role == "system":
            yield SystemMessage(role="system", content=content)
        elif message.role == "user":
            yield UserMessage(role="user", content=content)
        elif message.role == "tool":
            yield ToolMessage(
                role="tool", content=content, tool_call_id=_answered(message, unanswered)
            )
        else:
            calls = [
                ToolCall(
                    id=call.id or f"call_{number}",
                    function=CalledFunction(
                        name=call.function.name,
                        arguments=orjson.dumps(call.function.arguments or {}).decode(),
                    ),
                )
                for number, call in enumerate(message.tool_calls or (), num_calls)
            ]
            num_calls, unanswered = num_calls + len(calls), calls[:]
            yield AssistantMessage(
                role="assistant",
                content=content,
                reasoning_content=message.thinking or None,
                tool_calls=calls or None,
            )


def _answered(message: OllamaMessage, unanswered: list[ToolCall]) -> str:
    """The id of the call that a tool's message is the result of."""
    if message.tool_call_id is not None:
        return message.tool_call_id
    named = (call for call in unanswered if call.function.name == message.tool_name)
    call = next(named, unanswered[0] if unanswered else None)
    if call is None:
        return "call_0"
    unanswered.remove(call)
    return call.id
