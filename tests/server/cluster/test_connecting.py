"""How long a connection waits: for the database, and not for the time that its own process lost."""

from __future__ import annotations

import select
from collections.abc import Callable, Generator
from contextlib import closing
from types import SimpleNamespace

import pytest
from psycopg.waiting import Ready, Wait

from server.store.postgres import database
from server.store.postgres.database import TIMEOUT_S, Hung, connect

#: What a wait finds, after so many milliseconds at most.
Poll = Callable[["Waits", float], list[tuple[int, int]]]


class Waits:
    """In place of the clock and of `select.poll`: ``poll`` says what each wait finds."""

    def __init__(self, poll: Poll) -> None:
        self.now_s, self.num_waits = 0.0, 0
        self._poll, self._real = poll, select.poll()

    def monotonic(self) -> float:
        return self.now_s

    def register(self, fd: int, events: int) -> None:
        self._real.register(fd, events)

    def real(self) -> list[tuple[int, int]]:
        return self._real.poll()

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.num_waits += 1
        return self._poll(self, timeout_ms)


def begin(monkeypatch: pytest.MonkeyPatch, poll: Poll) -> Waits:
    waits = Waits(poll)
    monkeypatch.setattr(database, "time", waits)
    fake = SimpleNamespace(poll=lambda: waits, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(database, "select", fake)
    return waits


def test_answer_is_read_by_a_process_that_was_stopped_while_it_waited(
    monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    def poll(waits: Waits, timeout_ms: float) -> list[tuple[int, int]]:
        if waits.num_waits > 1:
            return waits.real()
        waits.now_s += 3600.0
        return []

    with closing(connect(database_url)) as connection:
        waits = begin(monkeypatch, poll)
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
    assert waits.num_waits > 1


def test_database_that_never_answers_is_waited_for_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    def poll(waits: Waits, timeout_ms: float) -> list[tuple[int, int]]:
        waits.now_s += timeout_ms / 1000
        return []

    with closing(connect(database_url)) as connection:
        waits = begin(monkeypatch, poll)
        with pytest.raises(Hung, match="does not answer"):
            connection.execute("SELECT 1")
        assert connection.closed
    assert waits.now_s == pytest.approx(TIMEOUT_S)


def test_answer_that_is_there_is_read_where_no_time_is_left(database_url: str) -> None:
    def answered() -> Generator[Wait, Ready, str]:
        yield Wait.W  # a connection without anything to send can always be written
        return "answer"

    with closing(connect(database_url)) as connection:
        assert connection.wait(answered(), timeout=0.0) == "answer"
