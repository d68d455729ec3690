"""Responses that are kept: found by their names, told again, and continued."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from server.api.chat.messages import (
    AssistantMessage,
    ChatMessage,
    FunctionTool,
    SystemMessage,
    UserMessage,
)
from server.api.chat.prompt import PLACEHOLDER, Prompt, prompt_of, without
from server.api.openai.responses.events import SILENT, ResponseWriter
from server.api.openai.responses.items import (
    ID_PREFIX,
    Given,
    ItemReference,
    Json,
    Note,
    chat_messages,
)
from server.api.prepare import renamed
from server.engine.types import Finished, Started, TokenEvent
from server.errors import InvalidRequest, RequestError, SessionNotFound, invalid
from server.models.service import Service
from server.sessions.loader import PAGE_EVENTS
from server.store.base import Keyed

#: Of an id that a client may have invented.
MAX_SHOWN = 128


class ResponseNotFound(RequestError):
    """No such response of this owner's, be it that it was deleted or never stored."""

    code = "response_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(f"Response with id '{id[:MAX_SHOWN]}' not found.")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response in a store: ``keyed`` is where its session and its events are."""

    service: Service
    owner: str
    keyed: Keyed
    note: Note

    def writer(self, after: int = -1) -> ResponseWriter:
        """A writer that is about to be given the events."""
        return ResponseWriter(self.note, self.service.tokenizer, after)

    def started(self) -> Started:
        """The first event, which the log does not have."""
        keyed = self.keyed
        return Started(keyed.request_id, keyed.session, keyed.length, seq=keyed.first_seq)

    async def events(self, after: int) -> list[TokenEvent | Finished]:
        """Those after the session's event ``after``, to the response's last, or some of them.

        Raises `ResponseNotFound`, and `HistoryGone` where the log does not reach back.
        """
        session, owner = self.keyed.session, self.owner
        try:
            page = await self.service.async_engine.ask_store(
                lambda store: store.read(session, owner, after, PAGE_EVENTS)
            )
        except SessionNotFound:
            raise ResponseNotFound(self.note.id) from None
        ends = [index for index, event in enumerate(page) if isinstance(event, Finished)]
        return page[: ends[0] + 1] if ends else page

    async def replayed(self, after: int = SILENT) -> ResponseWriter:
        """A writer that has had all events that there are, page by page in the thread for it."""
        writer = self.writer(after)
        writer.write(self.started())
        seq, large = self.keyed.first_seq, self.service.large_answers
        while not writer.is_over and (events := await self.events(seq)):
            await large.run(partial(_write_all, writer, events))
            seq = events[-1].seq
        return writer

    async def response(self) -> bytes:
        """The response object as it is now, as JSON. Raises `QueueFull` as `LargeAnswers` does."""
        large = self.service.large_answers
        with large.reserve(self.owner, self.note.num_bytes):
            writer = await self.replayed()
            return await large.run(lambda: orjson.dumps(writer.response()))

    async def has_all(self, last_number: int) -> bool:
        """Whether no event comes after number ``last_number``."""
        if self.keyed.finished is None:
            return False
        return (await self.replayed(last_number)).num_events <= last_number + 1

    async def output(self) -> list[Json]:
        """The items that are written by now."""
        output: list[Json] = (await self.replayed()).response()["output"]
        return output


def _write_all(writer: ResponseWriter, events: Sequence[TokenEvent | Finished]) -> None:
    for event in events:
        writer.write(event)


async def find(services: Iterable[Service], owner: str, id: str) -> StoredResponse:
    """The response called ``id``, whichever of ``services`` has it. Raises `ResponseNotFound`."""
    for service in services:
        keyed = await service.keys.find(owner, id)
        if keyed is not None and keyed.note is not None:
            return StoredResponse(service, owner, keyed, Note.unpacked(keyed.note))
    raise ResponseNotFound(id)


# -------------------------------------------------------------------------------------------------
# How a conversation continues after a response: from its session's state, or from its first word.
#
# A session has read and written its text. What a template puts between the answer
# and the next one depends on nothing before it, mostly; where that is so, and the
# instructions and tools are the same, what is new is all that has to be read.


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


# -------------------------------------------------------------------------------------------------
# Items that a request's input only names: of stored responses, found by their names.
#
# The name of an item has that of its response in it, unless a client gave it.


#: Responses that one input may refer to: each is read from the store.
MAX_RESPONSES = 256

_NAME = re.compile(r"(?:msg|fc|fco|rs)_([0-9a-f]{48})_(?:in_)?[0-9]+")


def has_references(given: str | Sequence[Given]) -> bool:
    """Whether an input names items that are stored."""
    return bool(_references(given))


async def referred(find: FindTurn, given: str | Sequence[Given]) -> dict[str, Json]:
    """The items that ``given`` refers to, by their names. Raises `InvalidRequest`."""
    found: dict[str, Json] = {}
    read: dict[str, dict[str, Json]] = {}
    for index, item in _references(given):
        found[item.id] = await _item(find, item.id, f"input[{index}].id", read)
    return found


def _references(given: str | Sequence[Given]) -> list[tuple[int, ItemReference]]:
    """Those in an input, with their places; a text has none."""
    if isinstance(given, str):
        return []
    return [(index, item) for index, item in enumerate(given) if isinstance(item, ItemReference)]


async def _item(find: FindTurn, id: str, place: str, read: dict[str, dict[str, Json]]) -> Json:
    """The item ``id``; ``read`` are the responses that have been read for others."""
    named = _NAME.fullmatch(id)
    response = ID_PREFIX + named[1] if named else ""
    if named and response not in read:
        if len(read) == MAX_RESPONSES:
            raise invalid(place, f"the input refers to more than {MAX_RESPONSES} responses")
        read[response] = await _items(find, response, place)
    if id not in read.get(response, {}):
        raise invalid(place, f"item with id '{id}' not found in a stored response")
    return read[response][id]


async def _items(find: FindTurn, response: str, place: str) -> dict[str, Json]:
    """All items of a response, of its input and its output; empty if it is not found."""
    try:
        turn = await find(response)
    except ResponseNotFound:
        return {}
    except InvalidRequest as error:
        raise renamed(error, {error.param or "": place}) from None
    return {item["id"]: item for item in (*turn.note.items, *await turn.output())}
