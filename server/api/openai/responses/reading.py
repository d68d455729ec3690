"""Responses that are kept: found by their names, and told again from the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import orjson

from server.api.openai.responses.note import Json, Note
from server.api.openai.responses.writer import SILENT, ResponseWriter
from server.engine.types import Finished, Started, TokenEvent
from server.errors import RequestError, SessionNotFound
from server.models.service import Service
from server.sessions.resume import PAGE_EVENTS
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
