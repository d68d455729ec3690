"""From a chat, as any dialect's body comes to it, to the one request of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from model.chat.call_forms import CallForm
from server.api.chat.answer_options import (
    Effort,
    ReasoningOptions,
    reasoning_of,
    sampling_of,
    turn_of,
)
from server.api.chat.calls import ToolChoice, ToolUse, tool_use
from server.api.chat.messages import ChatMessage, FunctionTool
from server.api.chat.prompt import Prompt, continued_prompt, prompt_of
from server.api.prepare import Conversation, generate_request, prompt_tokens, renamed
from server.api.schemas.requests import Continuation, Drawing, ResponseFormat
from server.engine.types import Request, Turn
from server.errors import InvalidRequest
from server.models.service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a dialect's body asks for, in one form for all of them."""

    #: Of the request, and of the answer.
    id: str
    messages: Sequence[ChatMessage]
    #: Temperature, penalties, stops and the like.
    drawing: Drawing
    #: The model or session, whether it is kept, and the client's key.
    wanted: Continuation
    tools: Sequence[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    #: None for the server's default.
    max_tokens: int | None = None
    num_choices: int = 1
    with_logprobs: bool = False
    #: How much to think; None where the body does not say.
    effort: Effort | None = None
    #: The field of the body that ``effort`` comes from.
    effort_field: str = "reasoning_effort"
    #: At most so many tokens of thinking; None for the server's bound.
    max_thinking_tokens: int | None = None
    add_generation_prompt: bool | None = None
    #: Whether the answer continues the last message, which is the assistant's.
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: A text that is expected.
    prediction: str | None = None
    #: What the fields ``messages``, ``max_tokens``, ``response_format``, ``tools`` and ``stop`` are
    #: called by the dialect, where that is another name.
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """The engine's request of a chat; its answer may have calls in the form ``calls``."""

    request: Request
    calls: CallForm | None


async def prepared(service: Service, owner: str, chat: Chat) -> PreparedChat:
    """What ``chat`` asks the engine for. Raises `RequestError` in the dialect's words."""
    try:
        use = await _use(service, chat)
        try:
            return PreparedChat(await _request(service, owner, chat, use), use.calls)
        except InvalidRequest as error:
            is_of_calls = use.calls is not None and error.param == "response_format"
            raise (renamed(error, {"response_format": "tools"}) if is_of_calls else error) from None
    except InvalidRequest as error:
        raise renamed(error, chat.names) from None


async def _use(service: Service, chat: Chat) -> ToolUse:
    """Each schema is looked at: of large ones in a thread."""
    wanted = (chat.tools, chat.tool_choice, chat.parallel_tool_calls, chat.response_format)
    if not chat.tools:
        return tool_use(*wanted, service.chat_template)
    return await asyncio.to_thread(tool_use, *wanted, service.chat_template)


async def _request(service: Service, owner: str, chat: Chat, use: ToolUse) -> Request:
    ids, turn, cache_at = await _prompt(service, owner, chat, use)
    sampling = sampling_of(
        *(service, chat.drawing, use.format, chat.max_tokens, chat.with_logprobs),
        chat.num_choices,
    )
    predicted: Sequence[int] = ()
    if chat.prediction is not None:
        predicted = await prompt_tokens(
            service, owner, chat.prediction, "prediction", continues=True
        )
    return await generate_request(
        *(service, chat.id, owner, ids, chat.wanted, sampling, chat.num_choices),
        conversation=Conversation("messages", turn, cache_at, predicted),
    )


async def num_prompt_tokens(service: Service, owner: str, chat: Chat) -> int:
    """How many tokens `prepared` would have the model read. Raises `RequestError` as it does."""
    try:
        use = await _use(service, chat)
        ids, _, _ = await _prompt(service, owner, chat, use)
    except InvalidRequest as error:
        raise renamed(error, chat.names) from None
    return len(ids)


async def _prompt(
    service: Service, owner: str, chat: Chat, use: ToolUse
) -> tuple[Sequence[int], Turn | None, tuple[int, ...]]:
    """The tokens to read, how the answer is read, and where later prompts will part."""
    reasoning = reasoning_of(service, chat.effort, chat.effort_field, chat.template_kwargs)
    bounds = [b for b in (chat.max_thinking_tokens, reasoning.budget) if b is not None]
    reasoning = replace(reasoning, budget=min(bounds, default=None))
    prompt = await _rendered(service, owner, chat, use, reasoning)
    if chat.continue_final_message:
        return prompt.ids, None, prompt.cache_at
    ignore_eos = bool(chat.drawing.ignore_eos)
    turn, added = turn_of(service, prompt.end, reasoning, use.format, ignore_eos)
    return [*prompt.ids, *added], turn, prompt.cache_at


async def _rendered(
    service: Service, owner: str, chat: Chat, use: ToolUse, reasoning: ReasoningOptions
) -> Prompt:
    """The new turns of the session that is continued, or the whole conversation."""
    variables = {**chat.template_kwargs, **reasoning.variables, **use.variables}
    said = (chat.messages, use.shown, chat.add_generation_prompt)
    if chat.wanted.session is not None:
        return await continued_prompt(
            *(service, owner, chat.wanted.session, *said, chat.continue_final_message),
            variables,
        )
    return await prompt_of(
        service,
        *said,
        continue_final_message=chat.continue_final_message,
        template_kwargs=variables,
        owner=owner,
    )
