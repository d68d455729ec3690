"""Questions to the store that take more than one of its methods. The store thread runs them."""

from __future__ import annotations

from dataclasses import dataclass

from server.sessions.resume import PAGE_EVENTS, Page
from server.store.base import Loaded, Numbered, Store
from server.store.errors import HistoryGone, OwnedElsewhere


@dataclass(frozen=True, slots=True)
class LogPage:
    """Some entries of a log with their numbers, from ``start`` on; its next one gets ``end``."""

    start: int
    entries: Numbered
    end: int


def read_log(store: Store, session: str, owner: str, place: int | None) -> LogPage:
    """The entries of a session's log from number ``place`` on; None is the oldest that is kept.

    Raises `SessionNotFound`, `SessionBroken` or `HistoryGone`.
    """
    end = store.log_end(session, owner)
    if place is not None and place > end:
        return LogPage(place, [], end)
    entries = store.entries(session, owner, place or 0, PAGE_EVENTS)
    start = entries[0][0] if entries else end
    if place not in (None, start):
        raise HistoryGone("the stream begins later: older messages are no longer kept", "offset")
    return LogPage(start, entries, max(end, start + len(entries)))


def read_page(store: Store, session: str, owner: str, after_seq: int) -> Page:
    """Raises `SessionNotFound` and `SessionBroken`."""
    try:
        return Page(after_seq, tuple(store.read(session, owner, after_seq, PAGE_EVENTS)))
    except HistoryGone:
        return Page(after_seq, (), is_gone=True)


def load_session(
    store: Store, session: str, owner: str, at: int | None = None, after_seq: int | None = None
) -> tuple[Loaded, Page | None] | OwnedElsewhere:
    """The session, as `Store.load` gives it, and the first page of its events after ``after_seq``.

    Raises what `Store.load` raises, but returns `OwnedElsewhere`.
    """
    try:
        loaded = store.load(session, owner, at)
    except OwnedElsewhere as owned:
        return owned
    return loaded, None if after_seq is None else read_page(store, session, owner, after_seq)
