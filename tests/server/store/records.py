"""Small sessions for the tests of stores, written as an engine would write them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from server.engine.session import (
    Accepted,
    Deleted,
    Entry,
    Opened,
    Progress,
    Record,
    Rewound,
    Saved,
    SessionValue,
    StateBlock,
    UnfedSegment,
)
from server.engine.types import Finished, FinishReason, Request, SamplingParams, TokenEvent, Usage
from server.store.base import Chunk, Identity, Keyed, Store
from server.store.states import export_state, tuned_state

STATE_BYTES = 24
IDENTITY = Identity("model-1", "tokenizer-1", "native", "float32", STATE_BYTES, "layout-1")
NOTE = '{"what": "was asked – “so”"}'  # noqa: RUF001


def block(position: int) -> StateBlock:
    """The state of a session that has seen ``position`` tokens, as the tests would have it."""
    return StateBlock(np.arange(position, position + STATE_BYTES).astype(np.uint8))


class Writer:
    """One session that makes records; ``text`` is what a correct store leads back to.

    Of the first ``origin`` tokens its log knows nothing.
    """

    def __init__(self, id: str = "s1", owner: str = "ann") -> None:
        self.value = SessionValue(id, owner)
        self.text: list[int] = []
        self.origin = 0
        self.entries: list[Entry] = []
        self._request: Request | None = None

    @property
    def id(self) -> str:
        return self.value.id

    def opened(self, state: StateBlock | None = None, text: tuple[int, ...] = ()) -> Record:
        self.text, self.origin = list(text), len(text)
        self._move(position=len(text), state=state)
        return self.id, Opened(self.value)

    def accepted(
        self,
        tokens: tuple[int, ...] = (1, 2),
        *,
        request_id: str = "r1",
        key: str | None = None,
        feeds_only: bool = False,
    ) -> Record:
        sampling = None if feeds_only else SamplingParams()
        self._request = Request(
            request_id, self.value.owner, tokens, sampling, self.id, keep=True, key=key
        )
        entry = Accepted(self._request, tokens, len(self.text), self.value.seq)
        self.text += tokens
        progress = Progress(self._request, entry.length)
        return self._counted(entry, position=len(self.text), progress=progress)

    def token(self, text: str = "é") -> Record:
        assert self._request is not None
        seq = self.value.seq + 1
        entry = TokenEvent(
            self._request.request_id, seq, len(self.text), 100 + len(self.text), text
        )
        if seq % 3 == 0:
            entry = entry._replace(logprob=-0.1 * seq, top=((seq, -0.1 * seq), (7, -9.5)))
        self.text.append(entry.token_id)
        return self._counted(entry, position=len(self.text), seq=seq)

    def tokens(self, count: int) -> list[Record]:
        return [self.token() for _ in range(count)]

    def finished(self, reason: FinishReason | None = "stop") -> Record:
        assert self._request is not None
        seq = self.value.seq + (self._request.sampling is not None)
        entry = Finished(
            self._request.request_id, self.id, seq, len(self.text), "", reason, Usage(2, 3)
        )
        self._request = None
        return self._counted(entry, seq=seq, progress=None)

    def saved(self, *, evicted: bool = False) -> Record:
        self.value = replace(self.value, state=block(self.value.position))
        return self.id, Saved(self.value, evicted)

    def saved_within(self, position: int) -> Record:
        """The state has seen so much of the text, which ends in a prompt."""
        *unfed, pending = self.text[position:]
        segments = (UnfedSegment(tuple(unfed), len(unfed)),) if unfed else ()
        state = self.state_at(position)
        value = replace(self.value, position=position, unfed=segments, state=state, pending=pending)
        return self.id, Saved(value)

    def state_at(self, position: int) -> StateBlock | None:
        """The state that has seen so much of the text."""
        return block(position) if position else None

    def rewound(self, length: int) -> Record:
        del self.text[length:]
        self._move(position=length, state=block(length), epoch=self.value.epoch + 1, progress=None)
        entry = Rewound(self.value)
        self.entries.append(entry)
        return self.id, entry

    def deleted(self) -> Record:
        return self.id, Deleted()

    def turn(self, count: int, **accepted: object) -> list[Record]:
        """A whole request that generates ``count`` tokens."""
        begin = self.accepted(**accepted)  # type: ignore[arg-type]
        return [begin, *self.tokens(count), self.finished()]

    def _counted(self, entry: Entry, **changes: object) -> Record:
        self._move(log_index=self.value.log_index + 1, **changes)
        self.entries.append(entry)
        return self.id, entry

    def _move(self, **changes: object) -> None:
        self.value = replace(self.value, **changes)  # type: ignore[arg-type]


def noted(record: Record) -> Record:
    """The record of a request that has a note."""
    id, entry = record
    assert isinstance(entry, Accepted)
    return id, entry._replace(request=replace(entry.request, note=NOTE))


def key_of(store: Store, key: str) -> Keyed:
    """Ann's request under ``key``, which is there."""
    found = store.find_key("ann", key)
    assert found is not None
    return found


def named_file(number: int) -> list[Chunk]:
    """A named state's file."""
    return export_state(tuned_state(block(number)), IDENTITY)


def file_digest(number: int) -> str:
    """What it is known by."""
    return tuned_state(block(number)).digest


def text_after(length: int, entries: list[Entry]) -> list[int | None]:
    """The text that ``entries`` lead to; None for the ``length`` tokens before them."""
    text: list[int | None] = [None] * length
    for entry in entries:
        match entry:
            case Accepted():
                assert len(text) == entry.length
                text += entry.tokens
            case TokenEvent():
                assert len(text) == entry.position
                text.append(entry.token_id)
            case Finished():
                del text[entry.position :]
            case Rewound():
                assert len(text) >= entry.value.length
                del text[entry.value.length :]
    return text


def in_ticks(store: Store, records: list[Record]) -> None:
    """Each record in a commit of its own."""
    for record in records:
        store.commit([record])
