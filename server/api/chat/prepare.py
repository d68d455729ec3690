"""From a chat, as any dialect's body comes to it, to the one request of the engine.

How much the model thinks, how it draws and where the answer ends come from the body and the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from model.chat import PLAIN, SWITCHES, CallForm, Thinking
from server.api.chat.calls import ToolCallsFormat, ToolChoice, ToolUse, tool_use
from server.api.chat.messages import ChatMessage, FunctionTool
from server.api.chat.prompt import Prompt, continued_prompt, prompt_of
from server.api.prepare import Conversation, generate_request, prompt_tokens, renamed
from server.api.schemas.requests import Continuation, Drawing, ResponseFormat, Sampling, TextFormat
from server.engine.types import Request, Turn
from server.errors import InvalidRequest, invalid
from server.models.service import Service

# -------------------------------------------------------------------------------------------------
# How much a model thinks before it answers: what requests and the server say of it.


#: OpenAI's words, the least first.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
#: What a model without levels understands.
USUAL: Effort = "medium"

#: The template's variable.
LEVEL = "reasoning_effort"

Format = ResponseFormat | ToolCallsFormat | None


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """``variables`` are for the template; at most ``budget`` tokens are thought, None for any.

    ``effort`` is the request's word.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None
    effort: Effort | None = None


def reasoning_of(
    service: Service, effort: Effort | None, param: str, given: Mapping[str, Any] | None = None
) -> ReasoningOptions:
    """What a request asks for: ``effort`` in the field ``param``, or a variable that is ``given``.

    Else it is what the server was started with, or what the template does by itself. Raises
    `InvalidRequest` for what the model cannot do.
    """
    thinking = service.chat_template.thinking
    if thinking is None:
        if effort not in (None, "none"):
            raise invalid(param, "is not supported: the model does not reason apart")
        return ReasoningOptions(effort=effort)
    given = given or {}
    is_on = _asked(effort, param, given)
    if is_on is None:
        is_on = _usual(service, thinking)
    variables: dict[str, Any] = {}
    if is_on is not None:
        switches = (switch for switch in thinking.switches if switch.name not in given)
        variables = {switch.name: switch.on if is_on else switch.off for switch in switches}
    if effort is not None and effort != "none":
        variables |= _level(thinking, effort, param)
    return ReasoningOptions(variables, _budget(service, thinking, is_on), effort)


def _asked(effort: Effort | None, param: str, given: Mapping[str, Any]) -> bool | None:
    """Whether a request wants thinking; None where it does not say."""
    is_on = None if effort is None else effort != "none"
    for switch in SWITCHES:
        value = given.get(switch.name)
        if value is None:
            continue
        if type(value) is not type(switch.on) or value not in (switch.on, switch.off):
            if isinstance(value, str) and isinstance(switch.on, str):
                continue  # one more form of a prompt, which the template knows
            raise invalid("chat_template_kwargs", f"{switch.name} must be true or false")
        if is_on not in (None, value == switch.on):
            other = "another variable" if effort is None else param
            raise invalid("chat_template_kwargs", f"{switch.name} contradicts {other}")
        is_on = value == switch.on
    return is_on


def _usual(service: Service, thinking: Thinking) -> bool | None:
    """Whether a request that does not say has thinking; None leaves it to the template."""
    match service.reasoning:
        case None:
            return thinking.default
        case "template":
            return None
        case setting:
            return setting != "off"


def _level(thinking: Thinking, effort: Effort, param: str) -> dict[str, Any]:
    if not thinking.efforts:
        if effort != USUAL:
            raise invalid(param, f"the model has no levels: give none or {USUAL}")
        return {}
    if effort not in thinking.efforts:
        raise invalid(param, f"must be none, {', '.join(thinking.efforts)} for this model")
    return {LEVEL: effort}


def _budget(service: Service, thinking: Thinking, is_on: bool | None) -> int | None:
    """The server's bound; a template that always thinks has its thinking closed at once."""
    if is_on is False:
        return None if thinking.switches else 0
    setting = service.reasoning or ""
    return int(setting) if setting.isdecimal() else None


def turn_of(
    service: Service, prompt_end: str, reasoning: ReasoningOptions, format: Format, ignore_eos: bool
) -> tuple[Turn | None, list[int]]:
    """How the engine reads the answer to a prompt that ends with ``prompt_end``; tokens to add.

    These are what the model writes before its answer, where a grammar leaves no room for it: the
    end of a marker that the prompt has begun, and white space.
    """
    template, encode = service.chat_template, service.tokenizer.encode_continuation
    thinking = template.thinking
    prompted, lead = (thinking or Thinking()).prompted("" if thinking is None else prompt_end)
    added: list[int] = []
    if is_bound(format) and prompted != "open" and prompt_end[-1:].strip():
        gap = thinking.gap if thinking is not None and prompted else template.turns.space
        added, lead = encode(lead + gap), ""
    if thinking is None:
        return None, added
    turn = Turn(
        thinking.begin,
        thinking.end,
        prompted,
        lead,
        () if is_bound(format) or ignore_eos else template.turns.ends,
        reasoning.budget,
        tuple(encode(thinking.close)),
        tuple(encode(thinking.gap)),
    )
    return turn, added


def is_bound(format: Format) -> bool:
    """Whether an answer in ``format`` is written under a grammar."""
    return format is not None and not isinstance(format, TextFormat)


# -------------------------------------------------------------------------------------------------
# How an answer to messages is drawn, and where it ends: by its length, a text or a token.


#: Tokens of all choices of one answer, of a model that ends its answers by itself.
MAX_DEFAULT_TOKENS = 4096
MIN_DEFAULT_TOKENS = 256


def sampling_of(
    service: Service,
    body: Drawing,
    format: Format,
    max_tokens: int | None,
    with_logprobs: bool,
    num_choices: int = 1,
) -> Sampling:
    """The body's own, with what other routes call otherwise and what the template ends turns by."""
    given: dict[str, Any] = {name: getattr(body, name) for name in Drawing.model_fields}
    return Sampling.model_construct(
        **given
        | {
            "max_tokens": _max_tokens(service, max_tokens, num_choices),
            "top_logprobs": (body.top_logprobs or 0) if with_logprobs else None,
            "response_format": format,
            "stop": _stops(service, body.stop, format, bool(body.ignore_eos)),
            "stop_token_ids": _end_tokens(service, body.stop_token_ids, bool(body.ignore_eos)),
        }
    )


def _max_tokens(service: Service, wanted: int | None, num_choices: int) -> int | None:
    """``wanted``, or a bound that is beyond the usual end of an answer; None for the server's.

    A model with a chat template of its own has learnt to end its answers. Without one
    it writes on until it is cut, and the default of every route is enough.
    """
    if wanted is not None or service.chat_template.source == PLAIN:
        return wanted
    room = max(MAX_DEFAULT_TOKENS // num_choices, MIN_DEFAULT_TOKENS)
    return min(room, service.limits.max_tokens)


def _stops(
    service: Service, given: str | Sequence[str] | None, format: Format, ignore_eos: bool
) -> list[str] | None:
    """The strings that end an answer: the client's, and those that end the model's turns.

    Nothing but its end ends what has a format.
    """
    stops = [given] if isinstance(given, str) else list(given or ())
    may_be_text = isinstance(format, ToolCallsFormat) and isinstance(format.otherwise, TextFormat)
    if not ignore_eos and (may_be_text or not is_bound(format)):
        stops += [end for end in service.chat_template.turns.ends if end not in stops]
    return stops or None


def _end_tokens(service: Service, given: Sequence[int] | None, ignore_eos: bool) -> list[int]:
    """The tokens that end an answer: the template may end its turns by another than the model's."""
    ends = list(given or ())
    turn_ends = service.chat_template.special_tokens.get("eos_token", "")
    id = service.tokenizer.special_ids.get(turn_ends)
    return ends if id is None or ignore_eos or id in ends else [*ends, id]


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
