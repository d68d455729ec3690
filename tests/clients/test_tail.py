from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.examples.tail import MAX_LINE_BYTES, Place, Tail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def tail(log: Path) -> Iterator[Tail]:
    tail = Tail(log)
    yield tail
    tail.close()


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def texts(tail: Tail) -> list[str]:
    return [line.data.decode() for line in tail.lines()]


def test_yields_new_lines_once_they_are_complete(log: Path, tail: Tail) -> None:
    assert texts(tail) == []  # the file is not there yet
    add(log, "one\n\ntw")
    assert texts(tail) == ["one", ""]
    assert texts(tail) == []
    add(log, "o\nthree\n")
    assert texts(tail) == ["two", "three"]


def test_renamed_file_is_read_to_its_end_before_the_new_one(log: Path, tail: Tail) -> None:
    add(log, "one\n")
    assert texts(tail) == ["one"]
    add(log, "two\nlast")
    log.rename(log.with_name("log.1"))
    assert texts(tail) == ["two"]  # no other file yet, and perhaps more of this one
    add(log, "three\n")
    assert texts(tail) == ["last", "three"]


def test_truncated_file_is_read_from_its_start(log: Path, tail: Tail) -> None:
    add(log, "one\ntwo\n")
    first = list(tail.lines())
    log.write_text("new\n")
    again = list(tail.lines())
    assert [line.data for line in again] == [b"new"]
    assert (first[0].begin.number, again[0].begin.number) == (0, 1)


def test_every_line_has_a_name_of_its_own(log: Path, tail: Tail) -> None:
    names: list[Place] = []
    for _ in range(3):
        add(log, "same\nsame\n")
        names += [line.begin for line in tail.lines()]
        log.write_text("")
        assert texts(tail) == []
    assert len({(name.number, name.offset) for name in names}) == 6


@pytest.mark.parametrize("num_read", [1, 2, 3])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_resumes_from_an_offset(log: Path, num_read: int, is_renamed: bool) -> None:
    add(log, "one\ntwo\nthree\n")
    first = Tail(log)
    place = [line.end for line in first.lines()][num_read - 1]
    first.close()
    if is_renamed:  # while no reader follows
        log.rename(log.with_name("log.1"))
    add(log, "four\n")
    second = Tail(log, place)
    assert texts(second) == ["one", "two", "three", "four"][num_read:]
    second.close()


def test_offset_in_a_deleted_file_is_the_start_of_the_next(log: Path) -> None:
    add(log, "one\n")
    tail = Tail(log, Place(inode=0, number=4, offset=100))
    (line,) = tail.lines()
    tail.close()
    assert (line.data, line.begin.number, line.begin.offset) == (b"one", 5, 0)


@pytest.mark.parametrize("num_bytes", [MAX_LINE_BYTES - 1, MAX_LINE_BYTES, 3 * MAX_LINE_BYTES + 5])
def test_line_of_any_length_takes_little_memory(log: Path, tail: Tail, num_bytes: int) -> None:
    add(log, "x" * num_bytes + "\nnext\n")
    *pieces, last = (line.data for line in tail.lines())
    assert last == b"next"
    assert b"".join(pieces) == b"x" * num_bytes
    assert max(map(len, pieces)) <= MAX_LINE_BYTES
