"""Checksums for the rows that a store already has when it learns to keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.store.heads import COLUMNS, Head
from server.store.sums import row_sum


def add_sums(execute: Callable[..., Any]) -> None:
    """Takes every row to be as it was written. The journal's have none: they go soon."""
    for row in execute(f"SELECT {COLUMNS} FROM session").fetchall():  # noqa: S608
        head = Head(*row[:-1])
        execute("UPDATE session SET sum = ? WHERE key = ?", (head.sum, head.key))
    for session, first, *rest in execute(
        'SELECT session, first, "end", last_seq, running, data FROM segment'
    ):
        stamp = row_sum(session, first, *rest[:-1], data=rest[-1])
        query = "UPDATE segment SET sum = ? WHERE session = ? AND first = ?"
        execute(query, (stamp, session, first))
    for key, *columns in execute(
        "SELECT snapshot.key, session, place, length, value, file, fields FROM snapshot "
        "LEFT JOIN identity ON identity.key = snapshot.identity"
    ).fetchall():
        execute("UPDATE snapshot SET sum = ? WHERE key = ?", (row_sum(*columns), key))
    for *columns, finished, note in execute(
        "SELECT owner, key, session, session_id, request_id, first_seq, length, is_append, "
        "finished, note FROM request_key"
    ).fetchall():
        stamp = row_sum(*columns) + (0 if finished is None else row_sum(finished))
        note_sum = None if note is None else row_sum(note)
        query = "UPDATE request_key SET sum = ?, note_sum = ? WHERE owner = ? AND key = ?"
        execute(query, (stamp, note_sum, *columns[:2]))
