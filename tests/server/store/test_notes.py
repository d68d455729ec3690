"""What comes with a request to be kept along with its key: with the session, and no longer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from server.store.base import RecordRefused, Store
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import open_store
from tests.server.store.records import IDENTITY, NOTE, Writer, key_of, noted


def note_of(store: Store, owner: str = "ann") -> str | None:
    keyed = store.find_key(owner, "k")
    return None if keyed is None else keyed.note


def test_note_is_found_under_its_key_after_the_first_commit(store: Store) -> None:
    writer = Writer()
    store.commit([writer.opened(), noted(writer.accepted(key="k"))])
    assert (note_of(store), note_of(store, "bob")) == (NOTE, None)
    store.commit([writer.token(), writer.finished()])
    assert note_of(store) == NOTE
    keyed = key_of(store, "k")
    assert keyed.finished == writer.entries[-1]


def test_note_is_deleted_with_its_session(store: Store) -> None:
    writer = Writer()
    store.commit([writer.opened(), noted(writer.accepted(key="k")), writer.finished()])
    store.commit([writer.deleted()])
    assert note_of(store) is None
    assert key_of(store, "k")


def test_note_expires_with_its_session(small: Store) -> None:
    writer = Writer()
    small.maintain(0.0)
    small.commit([writer.opened(), noted(writer.accepted(key="k")), writer.finished()])
    small.commit([writer.saved(evicted=True)])
    small.maintain(3599.0)
    assert note_of(small) == NOTE
    small.maintain(7300.0)
    assert note_of(small) is None


def test_note_that_cannot_be_stored_fails_its_commit(store: Store) -> None:
    writer, other = Writer(), Writer("s2")
    store.commit([writer.opened(), other.opened()])
    id, entry = noted(writer.accepted(key="k"))
    refused = entry._replace(request=replace(entry.request, note="\ud800"))
    with pytest.raises(RecordRefused):
        store.commit([other.accepted(), (id, refused)])
    assert (store.find_key("ann", "k"), store.unfinished()) == (None, [])
    store.commit([(id, entry), writer.token()])
    assert note_of(store) == NOTE


def test_note_counts_toward_the_bytes_of_its_owner(store: Store) -> None:
    with_note, without = Writer("s1"), Writer("s2", "bob")
    store.commit([with_note.opened(), noted(with_note.accepted(key="k")), with_note.finished()])
    store.commit([without.opened(), without.accepted(key="k"), without.finished()])
    assert store.stored_bytes("ann") >= store.stored_bytes("bob") + len(NOTE)
    store.commit([with_note.deleted()])
    assert store.stored_bytes("ann") == 0


def test_note_survives_a_crash_after_the_commit(tmp_path: Path) -> None:
    path, writer = tmp_path / "store", Writer()
    store = open_store(path, IDENTITY)
    store.commit([writer.opened(), noted(writer.accepted(key="k")), writer.token()])
    shutil.copytree(path, tmp_path / "dead")  # as a process leaves it that dies now
    store.close()
    again = open_store(tmp_path / "dead", IDENTITY)
    assert note_of(again) == NOTE
    assert again.unfinished() == [("s1", "ann")]
    again.close()
    assert list(problems(tmp_path / "dead")) == []
