"""Named states as files: they outlast the process, and one that is broken harms no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.store.base import DiskFiles, StoreFailed
from server.store.sqlite.files import NAMED_DIR
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import open_store
from tests.server.store.records import IDENTITY, Writer, file_digest, named_file


class Failing(DiskFiles):
    """Cannot rename while ``fails``."""

    fails = False

    def rename(self, path: Path, to: Path) -> None:
        if self.fails:
            raise OSError(5, "no more")
        super().rename(path, to)


def test_next_process_has_them(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", IDENTITY)
    store.put_named("a", file_digest(1), named_file(1))
    store.put_named("b", file_digest(2), named_file(2))
    store.drop_named("b")
    store.close()
    again = open_store(tmp_path / "store", IDENTITY)
    assert again.named_states() == {"a": file_digest(1)}
    assert again.read_named("a") == b"".join(named_file(1))
    again.close()


def test_broken_file_is_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", IDENTITY)
    for name in ("a", "b", "c"):
        store.put_named(name, file_digest(1), named_file(1))
    store.close()
    folder = tmp_path / "store" / NAMED_DIR
    (folder / "a.safetensors").write_bytes(b"")
    (folder / "b.safetensors").write_bytes(b"\xff" * 100)
    (folder / "d.new").write_bytes(b"half")
    again = open_store(tmp_path / "store", IDENTITY)
    assert again.named_states() == {"c": file_digest(1)}
    again.close()


def test_check_names_a_broken_one(tmp_path: Path) -> None:
    store, writer = open_store(tmp_path / "store", IDENTITY), Writer()
    store.commit([writer.opened(), *writer.turn(3)])
    for name in ("good", "bad"):
        store.put_named(name, file_digest(1), named_file(1))
    store.close()
    assert list(problems(tmp_path / "store")) == []
    file = tmp_path / "store" / NAMED_DIR / "bad.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    line = "the named state bad: the file is not a state of everstream: its checksum is wrong"
    assert list(problems(tmp_path / "store")) == [line]


def test_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    files = Failing()
    store = open_store(tmp_path / "store", IDENTITY, files=files)
    store.put_named("a", file_digest(1), named_file(1))
    files.fails = True
    with pytest.raises(StoreFailed):
        store.put_named("a", file_digest(2), named_file(2))
    files.fails = False
    assert store.named_states() == {"a": file_digest(1)}
    assert store.read_named("a") == b"".join(named_file(1))
    assert [file.name for file in (tmp_path / "store" / NAMED_DIR).iterdir()] == ["a.safetensors"]
    store.close()
