"""How a conversation continues after a response: from its session's state, or from its first word.

A session has read and written its text. What a template puts between the answer
and the next one depends on nothing before it, mostly; where that is so, and the
instructions and tools are the same, what is new is all that has to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.openai.chat.continued import PLACEHOLDER, without
from server.api.openai.chat.conversation import Prompt, prompt_of
from server.api.openai.chat.messages import (
    AssistantMessage,
    ChatMessage,
    FunctionTool,
    SystemMessage,
    UserMessage,
)
from server.api.openai.responses.items import chat_messages
from server.api.openai.responses.note import Json, Note
from server.api.openai.responses.reading import ResponseNotFound, StoredResponse
from server.errors import InvalidRequest, RequestError, invalid
from server.models.service import Service

#: Responses of a conversation that is read again.
MAX_TURNS = 4096
#: Of what was said, as JSON: more than a chat template may write is of no use.
MAX_BYTES = 8 << 20


class PreviousNotFound(RequestError):
    """There is no such response to continue from."""

    code = "previous_response_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(
            f"Previous response with id '{id}' not found.", param="previous_response_id"
        )


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """A response that has ended; ``output`` reads what was written in it.

    ``kept`` is where its session is, if it is stored.
    """

    note: Note
    output: Callable[[], Awaitable[list[Json]]]
    kept: StoredResponse | None = None


#: Finds a turn by its name. Raises `ResponseNotFound`.
FindTurn = Callable[[str], Awaitable[ResponseTurn]]


@dataclass(frozen=True, slots=True)
class TurnInput:
    """What one turn asks: the new items, and what the model reads in addition.

    ``described`` are the tools as a template reads them, ``variables`` more for the template.
    """

    items: Sequence[Json]
    instructions: str | None
    tools: Sequence[FunctionTool]
    described: Sequence[Json] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    def messages(self, before: Sequence[Json] = ()) -> list[ChatMessage]:
        """The instructions, the items ``before``, and the new ones."""
        told = _instructions(self.instructions)
        return [*told, *chat_messages([*before, *self.items])]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an earlier response has generated: its tokens, the last one at least.

    The ``text`` that was shown is only for templates whose turns end by texts.
    """

    tokens: Sequence[int]
    text: str | None = None


async def whole_prompt(
    service: Service, owner: str, turn_input: TurnInput, before: Sequence[Json] = ()
) -> Prompt:
    """Everything, to be read from the beginning."""
    return await prompt_of(
        service,
        await asyncio.to_thread(turn_input.messages, before),
        turn_input.tools or None,
        template_kwargs=turn_input.variables,
        owner=owner,
    )


async def what_follows(service: Service, turn_input: TurnInput, answer: Answer) -> Prompt | None:
    """What comes after ``answer``.

    None where this template writes it otherwise for the answer that it has seen.
    """
    stub: list[ChatMessage] = [
        *_instructions(turn_input.instructions),
        UserMessage(role="user", content=PLACEHOLDER),
    ]
    said_it = AssistantMessage(role="assistant", content=PLACEHOLDER)
    tools = turn_input.tools or None
    try:
        asked = (await prompt_of(service, stub, tools)).ids
        open_end = await prompt_of(
            service, [*stub, said_it], tools, False, continue_final_message=True
        )
        new = await asyncio.to_thread(chat_messages, turn_input.items)
        messages = [*stub, said_it, *new]
        following = await prompt_of(service, messages, tools, template_kwargs=turn_input.variables)
    except InvalidRequest:
        return None  # the true conversation may be one that it accepts
    new_ids = await asyncio.to_thread(_new_ids, service, answer, asked, open_end.ids, following.ids)
    return None if new_ids is None else Prompt(new_ids, following.end)


def _new_ids(
    service: Service,
    answer: Answer,
    asked: Sequence[int],
    said: Sequence[int],
    following: Sequence[int],
) -> Sequence[int] | None:
    """What of ``following`` the session of ``answer`` has not: see `what_follows`.

    ``asked`` are the ids of a question, ``said`` those with the placeholder for its answer.
    """
    head, text = _spelled(service, asked), _spelled(service, said)
    space = text[len(head) :].removesuffix(PLACEHOLDER.encode())
    begins_alike = text == head + space + PLACEHOLDER.encode() and not space.strip()
    if not begins_alike or following[: len(said)] != said:
        return None
    return _behind(service, answer, space, following[len(said) :])


def _behind(
    service: Service, answer: Answer, space: bytes, new: Sequence[int]
) -> Sequence[int] | None:
    """What of ``new``, which follows an answer, its session has not.

    ``space`` stands before the answer. None where the session has something else.
    """
    if answer.text is None:
        if space:
            return None
        return new[1:] if new[:1] == list(answer.tokens[-1:]) else new
    has, shown = _spelled(service, answer.tokens), space + answer.text.rstrip().encode()
    if not has.startswith(shown):
        return None
    return without(service, new, has[len(shown) :])


async def history(find: FindTurn, last: ResponseTurn) -> list[Json]:
    """All items up to and with the turn ``last``, oldest first.

    Raises `InvalidRequest` where they are not all there, or too many.
    """
    turns, num_bytes = [last], 0
    while (previous := turns[-1].note.fields["previous_response_id"]) is not None:
        if len(turns) == MAX_TURNS:
            raise _unreadable(f"has more than {MAX_TURNS} responses")
        num_bytes += len(turns[-1].note.packed())
        if num_bytes > MAX_BYTES:
            raise _unreadable(f"has more than {MAX_BYTES} bytes")
        try:
            turns.append(await find(previous))
        except ResponseNotFound:
            raise _unreadable(f"is incomplete: {previous!r} was not found") from None
    items: list[Json] = []
    for turn in reversed(turns):
        items += [*turn.note.items, *await turn.output()]
    return items


def _unreadable(why: str) -> InvalidRequest:
    return invalid(
        "previous_response_id",
        "the conversation must be read again from its beginning, because its instructions or "
        f"tools are other ones now or the chat template wants it, and it {why}",
    )


def _instructions(text: str | None) -> list[ChatMessage]:
    return [] if text is None else [SystemMessage(role="system", content=text)]


def _spelled(service: Service, ids: Sequence[int]) -> bytes:
    """The bytes of ``ids``: one text in any tokenization; special tokens differ from all text."""
    tokenizer = service.tokenizer
    special = set(tokenizer.special_ids.values())
    return b"".join(
        b"\xff%d\xff" % id if id in special else tokenizer.token_bytes(id) for id in ids
    )
