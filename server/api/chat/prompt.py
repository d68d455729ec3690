"""Messages to token ids by the model's chat template, whole or as the next turn of a session."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.chat import LISTED, written
from model.tokenizer import Tokenizer
from server.api.chat.messages import (
    MAX_DEPTH,
    AssistantMessage,
    ChatMessage,
    FunctionTool,
    ToolMessage,
    UserMessage,
    arguments_of,
    is_plain_json,
    num_chars,
    text_of,
    tool_object,
)
from server.api.prepare import MAX_INLINE_CHARS, in_thread_if_long
from server.chat.renderer import Marks, Rendered, parted
from server.engine.text import TokenArray
from server.engine.types import Finished, TokenEvent
from server.errors import InvalidRequest, invalid
from server.models.service import Service
from server.store.base import HistoryGone

# -------------------------------------------------------------------------------------------------
# Where a conversation's next prompt will begin like this one: there its state is worth keeping.
#
# A prompt ends with what only belongs to it, such as the words that open an answer, the markers
# of thinking, or how long to think. The next prompt has the answer in their place. So the messages
# are rendered once more, followed by an answer and a question, and compared.


#: The prefix cache keeps no shorter beginnings; places that are nearer to each other are as one.
MIN_TOKENS = 32
#: What a turn to come says. It begins and ends with a letter, as most texts do.
_SAID = "So it was said"
_ANSWER, _QUESTION = ({"role": role, "content": _SAID} for role in ("assistant", "user"))

#: Characters before the place where two texts part: tokens of the rest are those of the whole.
_TAIL_CHARS = 2048
#: Tokens that must be the same before two ways to cut a text are taken for one.
_NUM_SYNCED = 8


def continuations(
    messages: Sequence[Mapping[str, Any]], with_tools: bool
) -> Sequence[Mapping[str, Any]]:
    """What to render with ``messages`` for texts that begin like prompts which continue them.

    One with an answer and a question; with tools also one that ends behind the messages, since
    calls and their results follow without a question, after which past thinking may be left out.
    """
    following = [_QUESTION] if messages[-1]["role"] == "assistant" else [_ANSWER, _QUESTION]
    found = [{"following": following, "add_generation_prompt": True}]
    return found + [{"following": [], "add_generation_prompt": False}] * with_tools


def places(
    ids: Sequence[int],
    text: str,
    shared: Sequence[tuple[int, str]],
    marks: Marks,
    tokenizer: Tokenizer,
) -> tuple[int, ...]:
    """After how many of ``ids``, the tokens of ``text``, another text ceases to be the same.

    ``shared`` has for each other text how many characters are the same, and its next ones.
    Ascending. Places that are not worth keeping are left out: too early, or shortly behind
    another one. So are those of which it is not certain how the texts are cut there.
    """
    found = {_agreed(ids, text, *each, marks, tokenizer) for each in shared}
    kept: list[int] = []
    for place in sorted(found):
        if place >= (kept[-1] if kept else 0) + MIN_TOKENS:
            kept.append(place)
    return tuple(kept)


def _agreed(
    ids: Sequence[int], text: str, num_same: int, ahead: str, marks: Marks, tokenizer: Tokenizer
) -> int:
    """Encodes the ends of the texts alone; 0 where their tokens are not those of the whole.

    White space where they part may be cut with what follows it, and so is not counted.
    """
    common = len(text[:num_same].rstrip())
    start = max(0, common - _TAIL_CHARS)
    tail = marks.ids(text[start:], tokenizer)
    compared = (text[start:common], text[start:num_same] + ahead)
    same = min(_num_equal(tail, marks.ids(part, tokenizer)) for part in compared)
    place, synced = len(ids) - len(tail) + same, min(same, _NUM_SYNCED)
    if place <= 0 or ids[place - synced :] != tail[same - synced :]:
        return 0
    return place


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


# -------------------------------------------------------------------------------------------------
# Messages to token ids, by the model's chat template.


#: What a template gets from the server, so that a client cannot give it.
RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


#: Of a prompt's text, what shows whether it ends within thinking.
END_CHARS = 256
#: What a message costs besides its text, as characters.
_MESSAGE_CHARS = 64


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
    given = await in_thread_if_long(
        _num_chars(messages, tools or (), template_kwargs or {}),
        lambda: _template_input(service, source, messages, tools or (), template_kwargs or {}),
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

    # `places` encodes up to three ends of each other text.
    ids, cache_at = await in_thread_if_long(len(text) * (1 + 3 * len(rendered.shared)), encoded)
    return Prompt(ids, text[-END_CHARS:], cache_at)


def _num_chars(
    messages: Sequence[ChatMessage], tools: Sequence[FunctionTool], given: Mapping[str, Any]
) -> float:
    """At least how much text `_template_input` goes through; tools and other values are a lot."""
    if tools or given:
        return math.inf
    num = 0.0
    for message in messages:
        num += _MESSAGE_CHARS + num_chars(message)
        if num > MAX_INLINE_CHARS:
            break
    return num


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
    """Goes through every text and value that the client gave: `_num_chars`."""
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


# -------------------------------------------------------------------------------------------------
# Messages that continue a kept session: the new turns alone, as the template writes them there.
#
# The session has read and written all that came before, so nothing of that is rendered. The new
# messages are rendered after a placeholder for it, and what follows the placeholder is the prompt.


#: Stands for what was said. It ends in a letter, so that no token reaches beyond it.
PLACEHOLDER = "Thus it was said"
#: The last events of an answer: what it has written after its text is in few of them.
_NUM_LAST = 64
#: Bytes of an answer's text by which its end is found.
_NUM_SOUGHT = 48


async def continued_prompt(
    service: Service,
    owner: str,
    session: str,
    messages: Sequence[ChatMessage],
    tools: Sequence[FunctionTool] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> Prompt:
    """What ``session`` is to read next, with the parameters of `prompt_of`.

    All that the template writes of ``messages`` where the session has not answered yet. Raises
    `RequestError`.
    """
    info = await service.sessions.info(session, owner)
    before: list[ChatMessage] = []
    if info.seq > 0:
        said = AssistantMessage(role="assistant", content=PLACEHOLDER)
        before = [UserMessage(role="user", content=PLACEHOLDER), said]
    prompt = await prompt_of(
        service,
        [*before, *messages],
        tools,
        add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=variables,
    )
    if not before:
        return prompt
    placeholder = await prompt_of(
        service, before, tools, continue_final_message=True, template_kwargs=variables
    )
    num_before = len(placeholder.ids)
    if prompt.ids[:num_before] != placeholder.ids:
        raise invalid("session", "the model's chat template does not write new turns by themselves")
    try:
        events = await service.sessions.read(
            session, owner, max(0, info.seq - _NUM_LAST), _NUM_LAST
        )
    except HistoryGone:
        events = []
    return Prompt(_unread(service, prompt.ids[num_before:], events, info.position), prompt.end)


def _unread(
    service: Service,
    new: Sequence[int],
    events: Sequence[TokenEvent | Finished],
    position: int,
) -> Sequence[int]:
    """What of ``new`` the session has not: its answer may have begun with what ends a turn.

    ``events`` are the last ones of the session, whose text has ``position`` tokens.
    """
    end = events[-1] if events else None
    if not isinstance(end, Finished) or end.position != position:
        return new  # not an answer, or other text came after it
    ends = [index for index, event in enumerate(events[:-1]) if isinstance(event, Finished)]
    last = events[ends[-1] + 1 :] if ends else events
    tokens = [event.token_id for event in last if isinstance(event, TokenEvent)]
    if tokens[-1:] == new[:1]:
        return new[1:]
    written = b"".join(map(service.tokenizer.token_bytes, tokens))
    shown = "".join(event.text for event in last).rstrip().encode()[-_NUM_SOUGHT:]
    place = written.rfind(shown)
    if not shown or place < 0:
        return new
    rest = without(service, new, written[place + len(shown) :])
    return new if rest is None else rest


def without(service: Service, ids: Sequence[int], begun: bytes) -> Sequence[int] | None:
    """``ids`` without the bytes ``begun`` that they begin with; None where they do not."""
    tokenizer = service.tokenizer
    place = 0
    while begun:
        token = tokenizer.token_bytes(ids[place]) if place < len(ids) else b""
        place += 1
        if not token or not (token.startswith(begun) or begun.startswith(token)):
            return None
        if len(token) > len(begun):
            rest = token[len(begun) :].decode(errors="replace")
            return [*tokenizer.encode_continuation(rest), *ids[place:]]
        begun = begun[len(token) :]
    return ids[place:]
