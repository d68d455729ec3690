"""(5) Any byte of a snapshot's file altered: it is refused, and the one before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.store.base import Loaded, SnapshotBroken
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import SqliteStore, open_store
from server.store.states import decode_state, encode_state
from tests.server.store.records import IDENTITY, Writer, block, text_after


def two_snapshots(path: Path) -> tuple[SqliteStore, Writer, list[Path]]:
    """A store whose session has two of them, and the file of each."""
    writer = Writer()
    store = open_store(path, IDENTITY)
    store.commit([writer.opened()])
    files: list[Path] = []
    for tick in range(2):
        store.commit([*writer.turn(3), writer.saved()])
        store.maintain(float(tick))
        files += [file for file in path.glob("snapshots/*/*") if file not in files]
    store.commit(writer.turn(2))
    return store, writer, files


def check(loaded: Loaded, position: int, writer: Writer) -> None:
    """The state after ``position`` tokens, and what leads on from there to the present."""
    assert loaded.value.position == position
    state = loaded.value.state
    assert (None if state is None else bytes(state.data)) == (
        bytes(block(position).data) if position else None
    )
    reached = text_after(loaded.value.length, loaded.entries)
    assert reached[position:] == writer.text[position:]


def test_every_flipped_byte_is_refused() -> None:
    file = b"".join(encode_state(block(7), IDENTITY, 7))
    assert bytes(decode_state(file, IDENTITY, 7).data) == bytes(block(7).data)
    for place in range(len(file)):
        for flip in (1, 0x20, 0x80, 0xFF):
            broken = bytearray(file)
            broken[place] ^= flip
            with pytest.raises(SnapshotBroken):
                decode_state(bytes(broken), IDENTITY, 7)


def test_every_shorter_or_longer_file_is_refused() -> None:
    file = b"".join(encode_state(block(7), IDENTITY, 7))
    for broken in [*(file[:size] for size in range(len(file))), file + b"\0", file * 2]:
        with pytest.raises(SnapshotBroken):
            decode_state(broken, IDENTITY, 7)


def test_the_state_of_another_position_is_refused() -> None:
    file = b"".join(encode_state(block(7), IDENTITY, 7))
    with pytest.raises(SnapshotBroken):
        decode_state(file, IDENTITY, 8)


def test_the_snapshot_before_a_broken_one_serves(tmp_path: Path, long: bool) -> None:
    store, writer, (_, newest) = two_snapshots(tmp_path)
    whole = newest.read_bytes()
    check(store.load("s1", "ann"), 10, writer)
    for place in range(0, len(whole), 1 if long else 29):
        broken = bytearray(whole)
        broken[place] ^= 0x10
        newest.write_bytes(broken)
        check(store.load("s1", "ann"), 5, writer)
    newest.unlink()
    check(store.load("s1", "ann"), 5, writer)
    store.close()


def test_the_whole_log_serves_where_both_are_broken(tmp_path: Path) -> None:
    store, writer, files = two_snapshots(tmp_path)
    for file in files:
        file.write_bytes(b"")
    check(store.load("s1", "ann"), 0, writer)
    store.close()
    assert len(list(problems(tmp_path))) == 2


def test_a_fork_whose_only_state_is_broken_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, IDENTITY)
    store.commit([Writer().opened(block(3), (1, 2, 3))])
    (file,) = tmp_path.glob("snapshots/*/*")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SnapshotBroken):
        store.load("s1", "ann")
    store.close()
