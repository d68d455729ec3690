"""What a store on tables is asked about sessions, within a transaction of the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from server.engine.types import Finished, TokenEvent
from server.engine.value import Entry, SessionValue
from server.store.base import Events, Listed, Loaded, Numbered
from server.store.errors import HistoryGone, SessionBroken
from server.store.heads import Head
from server.store.history import events_after, past
from server.store.saving import Connected

NOTHING: Iterable[Entry] = ()


def loaded(connection: Connected, head: Head, at: int | None) -> Loaded:
    """See `server.store.base.Store.load`."""
    check(head)
    for place, value in _values(connection, head, at):
        entries = connection.tables.entries(head, place)
        return Loaded(value, past(entries, value.length, at))
    raise HistoryGone("the session's state at this point is no longer kept", "at")


def check(head: Head) -> None:
    """Raises `SessionBroken` for a session in quarantine."""
    if head.broken is not None:
        raise SessionBroken


def _values(
    connection: Connected, head: Head, at: int | None
) -> Iterator[tuple[int, SessionValue]]:
    """Place and value of the snapshots of at most ``at`` tokens, newest first."""
    save = connection.unsaved.get(head.id)
    if save is not None and (at is None or save.value.length <= at):
        yield save.place, save.value
    yield from connection.snapshots.newest(head.key, at)


def events(
    connection: Connected,
    head: Head,
    after_seq: int,
    max_events: int,
    rest: Iterable[Entry] = NOTHING,
) -> Events:
    """See `server.store.base.Store.read`; ``rest`` is what comes after all that ``head`` has."""
    check(head)
    if after_seq < head.log_seq:
        raise HistoryGone(f"only what came after {head.log_seq} is kept", "last_seq")
    found = events_after(connection.tables.entries_after(head, after_seq), after_seq, max_events)
    last_seq = found[-1].seq if found else after_seq
    found += events_after(rest, last_seq, max_events - len(found))
    if [event.seq for event in found] != [*range(after_seq + 1, after_seq + 1 + len(found))]:
        raise SessionBroken
    if not found and max_events and head.seq > after_seq:
        raise SessionBroken
    return found


def entries(
    connection: Connected,
    head: Head,
    place: int,
    max_entries: int,
    rest: Iterable[Entry] = NOTHING,
) -> Numbered:
    """See `server.store.base.Store.entries`; ``rest`` as for `events`."""
    check(head)
    kept = connection.tables.numbered(head, place)
    others = (found for found in enumerate(rest, head.num_entries) if found[0] >= place)
    page = [*islice(chain(kept, others), max_entries)]
    if max_entries and place < head.num_entries and not _begins(page, place, head):
        raise SessionBroken
    return page


def log_end(head: Head, rest: Iterable[Entry] = NOTHING) -> int:
    """See `server.store.base.Store.log_end`; ``rest`` as for `events`."""
    check(head)
    return head.num_entries + sum(1 for _ in rest)


def _begins(page: Numbered, place: int, head: Head) -> bool:
    """Whether nothing is missing before ``page`` but what is no longer kept."""
    if page and page[0][0] == place:
        return True
    seqs = (entry.seq for _, entry in page if isinstance(entry, TokenEvent | Finished))
    return next(seqs, head.log_seq) <= head.log_seq + 1 if page else head.seq == head.log_seq


def listed(connection: Connected, owner: str | None, after: str | None, limit: int) -> list[Listed]:
    """See `server.store.base.Store.list`; of a session that has a head, as that is."""
    heads = connection.log.heads
    return [
        _as_known(heads[row[0]], row[-1])
        if row[0] in heads
        else Listed(*row[:5], row[5] is not None, row[6])
        for row in connection.tables.listed(owner, after, limit)
    ]


def _as_known(head: Head, num_bytes: int) -> Listed:
    is_running = head.running is not None
    return Listed(head.id, head.owner, head.epoch, head.length, head.seq, is_running, num_bytes)
