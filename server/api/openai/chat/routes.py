"""`POST /v1/chat/completions`: messages by the model's template, and calls of functions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from server.api.answers import JsonAnswer, SseAnswer
from server.api.openai.chat.body import (
    ChatBody,
    ChatCompletion,
    ReasoningOptions,
    reasoning_of,
    sampling_of,
    turn_of,
)
from server.api.openai.chat.calls import ToolUse, tool_use
from server.api.openai.chat.prompt import Prompt, continued_prompt, prompt_of
from server.api.openai.chat.writer import ChatWriter
from server.api.openai.choices import TokenNames
from server.api.prepare import Conversation, generate_request, prompt_tokens, renamed
from server.api.routing import ERRORS, EVENT_STREAM, body_schema, service_with
from server.api.schemas.parse import body_of
from server.engine.types import Request as EngineRequest
from server.errors import InvalidRequest, invalid
from server.models.service import ID_BYTES, LOGPROB_BYTES, TOKEN_BYTES, Service

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    response_model_exclude_unset=True,
    responses=ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(ChatBody),
)
async def chat(request: Request) -> Response:
    """Answer messages: JSON, or server-sent events with stream."""
    body = await body_of(ChatBody, request)
    service = await service_with(request, body.session, body.model)
    if body.session is not None or body.keep:
        request.state.caller.require("sessions")
    _check(body)
    # Each schema is looked at: of large ones in a thread.
    tools = await asyncio.to_thread(_tools, service, body) if body.tools else _tools(service, body)
    engine_request = await _engine_request(service, request.state.owner, body, tools)
    num_bytes = 0 if body.stream else _num_bytes(body, engine_request)
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    service.large_answers.check(num_bytes, param, f"n, {param} and top_logprobs")
    names, now = TokenNames(service.tokenizer) if body.logprobs else None, int(time.time())
    writer = ChatWriter(
        engine_request,
        service.model,
        now,
        body.stream_options,
        tools.calls,
        names,
        service.async_engine.epoch_name,
        bool(body.return_token_ids),
    )
    if body.stream:
        return SseAnswer(service, engine_request, writer)
    return JsonAnswer(service, engine_request, writer, num_bytes)


def _num_bytes(body: ChatBody, engine_request: EngineRequest) -> int:
    """What an answer may take."""
    assert engine_request.sampling is not None
    num_entries = 1 + (body.top_logprobs or 0) if body.logprobs else 0
    per_id = ID_BYTES if body.return_token_ids else 0
    per_token = TOKEN_BYTES + num_entries * LOGPROB_BYTES + per_id
    of_prompt = len(engine_request.tokens) * per_id
    return of_prompt + engine_request.num_choices * engine_request.sampling.max_tokens * per_token


def _check(body: ChatBody) -> None:
    """Raises `InvalidRequest` for fields that do not go together."""
    body.check(shows_logprobs=bool(body.logprobs))
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if body.max_completion_tokens is not None and body.max_tokens not in (
        None,
        body.max_completion_tokens,
    ):
        raise invalid("max_tokens", "is another name for max_completion_tokens: give one of them")


def _tools(service: Service, body: ChatBody) -> ToolUse:
    return tool_use(
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls,
        body.response_format,
        service.chat_template,
    )


async def _prompt(
    service: Service, owner: str, body: ChatBody, tools: ToolUse, reasoning: ReasoningOptions
) -> Prompt:
    """The new turns of the session that is continued, or the whole conversation."""
    given = body.chat_template_kwargs or {}
    variables = {**given, **reasoning.variables, **tools.variables}
    open_end = bool(body.continue_final_message)
    said = (body.messages, tools.shown, body.add_generation_prompt)
    if body.session is not None:
        return await continued_prompt(service, owner, body.session, *said, open_end, variables)
    return await prompt_of(
        service,
        *said,
        continue_final_message=open_end,
        template_kwargs=variables,
        owner=owner,
    )


async def _engine_request(
    service: Service, owner: str, body: ChatBody, tools: ToolUse
) -> EngineRequest:
    """The engine's request."""
    open_end = bool(body.continue_final_message)
    reasoning = reasoning_of(
        service, body.reasoning_effort, "reasoning_effort", body.chat_template_kwargs
    )
    prompt = await _prompt(service, owner, body, tools, reasoning)
    turn, added = None, list[int]()
    if not open_end:
        turn, added = turn_of(service, prompt.end, reasoning, tools.format, bool(body.ignore_eos))
    id = f"chatcmpl-{secrets.token_hex(16)}"
    max_tokens, num_choices = body.max_completion_tokens or body.max_tokens, body.n or 1
    sampling = sampling_of(
        service, body, tools.format, max_tokens, bool(body.logprobs), num_choices
    )
    predicted: Sequence[int] = ()
    if body.prediction is not None:
        text = body.prediction.text
        predicted = await prompt_tokens(service, owner, text, "prediction", continues=True)
    try:
        return await generate_request(
            *(service, id, owner, [*prompt.ids, *added], body, sampling, num_choices),
            conversation=Conversation("messages", turn, prompt.cache_at, predicted),
        )
    except InvalidRequest as error:
        raise _in_our_words(error, body, tools) from None


def _in_our_words(error: InvalidRequest, body: ChatBody, tools: ToolUse) -> InvalidRequest:
    """``error`` with the name that the field at fault has here."""
    names: dict[str, str] = {}
    if tools.calls is not None:
        names["response_format"] = "tools"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return renamed(error, names)
