"""Questions to the store that take more than one of its methods. The store thread runs them."""

from __future__ import annotations

from server.sessions.resume import PAGE_EVENTS, Page
from server.store.base import Loaded, Store
from server.store.errors import HistoryGone, OwnedElsewhere


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
