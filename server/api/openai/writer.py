"""What the answers of completions and of chats share: whole in parts, or in chunks, with usage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import orjson

from server.api.completion import DONE, total_usage, usage_object, whole_usage
from server.api.frames import EpochName
from server.api.schemas.requests import StreamOptions
from server.api.streaming import server_sent
from server.engine.types import Event, Finished, Usage

Json = dict[str, Any]


class WrittenChoice:
    """One continuation while it comes, number ``index`` of the answer."""

    index: int
    #: The event that it ended by.
    last: Event | None = None
    #: A token's chunk around what differs from token to token, once it is needed.
    around: tuple[bytes, ...] = ()


C = TypeVar("C", bound=WrittenChoice)


class AnswerWriter(Generic[C]):
    """Writes the ``choices`` of an answer, by the ids of their events, into what ``head`` says.

    Usage ends a stream, or is in each chunk so far, where its ``options`` say so. The events of a
    kept session have SSE ids: the epoch by its ``epoch_name``, which is asked when the session has
    started (the store may become another one until then), and the event's ``seq``, from which a
    client can resume.
    """

    def __init__(
        self,
        head: Json,
        choices: Mapping[str, C],
        options: StreamOptions | None,
        epoch_name: EpochName,
    ) -> None:
        self._epoch_name = epoch_name
        #: What the SSE ids of a kept session begin with, once it has started.
        self._id = b""
        self._head = {**head, "choices": []}
        self._choices = choices
        self._shows_usage = bool(options and options.include_usage)
        self._shows_so_far = bool(options and options.continuous_usage_stats)
        self._so_far = Usage(0, 0)

    def end(self) -> bytes:
        """What comes after the last event of all choices."""
        if not self._shows_usage or len(self._ends) < len(self._choices):
            return DONE
        return server_sent(orjson.dumps(self._summary())) + DONE

    @property
    def _ends(self) -> list[Finished]:
        lasts = (choice.last for choice in self._choices.values())
        return [last for last in lasts if isinstance(last, Finished)]

    def _summary(self) -> Json:
        """What an answer says of all of its choices."""
        return {**self._head, "usage": whole_usage(total_usage(self._ends))}

    def _sse_id(self, seq: int) -> bytes | None:
        return b"%b%d" % (self._id, seq) if self._id else None

    def _chunk(self, choice: Json, id: bytes | None = None, **more: Any) -> bytes:
        """A server-sent event of one choice."""
        chunk = {**self._head, "choices": [choice], **more}
        if self._shows_so_far:
            chunk["usage"] = usage_object(self._so_far)
        elif self._shows_usage:
            chunk["usage"] = None
        return server_sent(orjson.dumps(chunk), id=id)


def written_list(answer: Mapping[str, Any], name: str, items: Iterable[bytes]) -> Iterator[bytes]:
    """The JSON of ``answer``, in parts, with ``items`` in its list ``name``, which is empty.

    Empty items are skipped: other work can run there.
    """
    head, mark, tail = orjson.dumps(answer).partition(b'"%b":[' % name.encode())
    yield head + mark
    is_first = True
    for item in items:
        yield item if is_first or not item else b"," + item
        is_first = is_first and not item
    yield tail
