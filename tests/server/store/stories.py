"""A session as plain lists: it writes records as an engine would, and knows what must come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import cast

import numpy as np
import pytest

from model.tokenizer import Tokenizer
from server.engine.kept import replay
from server.engine.session import Record, Rewound, Saved, Session, StateBlock
from server.engine.text import Detokenizer
from server.engine.types import Finished, FinishReason, TokenEvent
from server.errors import SessionNotFound
from server.store.base import Events, HistoryGone, Store
from tests.server.store.records import STATE_BYTES, Writer


class OneLetter:
    """Every token is an x: what the tokens say is of no interest here."""

    silent_ids: frozenset[int] = frozenset()

    def token_bytes(self, id: int) -> bytes:
        return b"x"

    first_bytes = token_bytes


class Story(Writer):
    """A session as lists: its text, and the events that it has sent, one for each number."""

    def __init__(self, id: str, owner: str) -> None:
        super().__init__(id, owner)
        self.events: Events = []
        self.cut: int | None = None  # where the running request may still be cut back to
        self.turns = {0}  # lengths at which something happened

    def accepted(self, *args: object, **options: object) -> Record:
        self.cut = len(self.text)
        self.turns |= {self.cut, self.cut + 1, self.cut + 2}
        return super().accepted(*args, **options)  # type: ignore[arg-type]

    def token(self, text: str = "x") -> Record:
        """Another one in each epoch."""
        _, entry = super().token(text)
        progress = self.value.progress
        assert isinstance(entry, TokenEvent)
        assert progress is not None
        entry = entry._replace(token_id=entry.token_id + 10_000 * self.value.epoch)
        self.text[-1] = entry.token_id
        progress = replace(progress, num_generated=progress.num_generated + 1)
        self.value, self.cut = replace(self.value, progress=progress), None
        self.events.append(entry)
        return self.id, entry

    def saved(self, *, evicted: bool = False) -> Record:
        super().saved(evicted=evicted)
        self.cut = None
        self.value = replace(self.value, state=state_of(self.text))
        return self.id, Saved(self.value, evicted)

    def saved_within(self, position: int) -> Record:
        """Its prompt is not over; it was read up to ``cut`` before."""
        self.turns |= {position, position + 1, position + 2}
        self.cut = position
        return super().saved_within(position)

    def state_at(self, position: int) -> StateBlock | None:
        return state_of(self.text[:position])

    def rewound(self, length: int) -> Record:
        self.turns |= {len(self.text) - 1, length, length + 1}
        super().rewound(length)
        self.value = replace(self.value, state=state_of(self.text))
        return self.id, Rewound(self.value)

    def cancelled(self) -> Record:
        """Within its prompt, where that is not over."""
        if self.cut is not None:
            del self.text[self.cut + 1 :]
            self.value = replace(self.value, position=len(self.text))
        return self.finished("cancelled")

    def finished(self, reason: FinishReason | None = "stop") -> Record:
        assert self.value.progress is not None
        feeds_only = self.value.progress.request.sampling is None
        record = super().finished(None if feeds_only and reason == "stop" else reason)
        assert isinstance(record[1], Finished)
        if not feeds_only:
            self.events.append(record[1])
        return record


def state_of(text: Sequence[int]) -> StateBlock | None:
    """Sessions that have seen ``text`` have this one, and no others."""
    digest = sha256(repr(list(text)).encode()).digest()
    return StateBlock(np.frombuffer(digest[:STATE_BYTES], np.uint8).copy()) if text else None


def is_idle(story: Story) -> bool:
    return story.value.progress is None


def is_within_prompt(story: Story) -> bool:
    return story.cut is not None and story.cut < len(story.text)


def is_generating(story: Story) -> bool:
    progress = story.value.progress
    return progress is not None and progress.request.sampling is not None


def check_events(store: Store, story: Story, after: int, max_events: int) -> None:
    wanted = [event for event in story.events if event.seq > after][:max_events]
    assert store.read(story.id, story.value.owner, after, max_events) == wanted
    with pytest.raises(SessionNotFound):
        store.read(story.id, "eve", after, max_events)


def check_past(store: Store, story: Story, at: int | None) -> None:
    """What an engine makes of it is the text, up to ``at`` tokens of it."""
    if at is not None and at < story.origin:
        with pytest.raises(HistoryGone):
            store.load(story.id, story.value.owner, at)
        return
    loaded = store.load(story.id, story.value.owner, at)
    value = loaded.value
    state, wanted = value.state, state_of(story.text[: value.position])
    assert (state and state.data.tobytes()) == (wanted and wanted.data.tobytes())
    session = Session.of(value, Detokenizer(cast(Tokenizer, OneLetter())), 0.0)
    progress = replay(session, value.progress, loaded.entries, at)
    text = story.text[:at]
    assert session.next(session.length - session.position) == text[value.position :]
    assert session.length == len(text)
    present = story.value
    for name in ("epoch", "seq", "log_index"):
        assert at is not None or getattr(session, name) == getattr(present, name), name
    assert progress == (present.progress if at is None else None)
