"""`POST /v1/chat/completions`: messages by the model's template, and calls of functions."""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter, Request, Response

from server.api.answers import JsonAnswer, StreamAnswer
from server.api.chat.prepare import Chat, prepared
from server.api.openai.chat.body import ChatBody, ChatCompletion
from server.api.openai.chat.writer import ChatWriter
from server.api.openai.choices import TokenNames
from server.api.routing import ERRORS, EVENT_STREAM, body_schema, keyed, service_with
from server.api.schemas.parse import body_of
from server.engine.types import Request as EngineRequest
from server.errors import invalid
from server.models.service import ID_BYTES, LOGPROB_BYTES, TOKEN_BYTES

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
    body = keyed(request, await body_of(ChatBody, request))
    service = await service_with(request, body.session, body.model)
    if body.session is not None or body.keep:
        request.state.caller.require("sessions")
    _check(body)
    made = await prepared(service, request.state.owner, _chat(body))
    num_bytes = 0 if body.stream else _num_bytes(body, made.request)
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    service.large_answers.check(num_bytes, param, f"n, {param} and top_logprobs")
    names, now = TokenNames(service.tokenizer) if body.logprobs else None, int(time.time())
    writer = ChatWriter(
        made.request,
        service.model,
        now,
        body.stream_options,
        made.calls,
        names,
        service.async_engine.epoch_name,
        bool(body.return_token_ids),
    )
    if body.stream:
        return StreamAnswer(service, made.request, writer)
    return JsonAnswer(service, made.request, writer, num_bytes)


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


def _chat(body: ChatBody) -> Chat:
    is_renamed = body.max_completion_tokens is not None
    return Chat(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=body.response_format,
        drawing=body,
        wanted=body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_choices=body.n or 1,
        with_logprobs=bool(body.logprobs),
        effort=body.reasoning_effort,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        prediction=None if body.prediction is None else body.prediction.text,
        names={"max_tokens": "max_completion_tokens"} if is_renamed else {},
    )
