"""One process owns a store: a dead owner is followed at once, a stopped one after a lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.store.base import Fenced, StoreError, StoreInUse
from server.store.sqlite.database import Waiting
from server.store.sqlite.maintenance import open_for_reading, problems
from server.store.sqlite.store import open_store
from tests.server.store.records import IDENTITY, Writer
from tests.stopping import stop

pytestmark = pytest.mark.process

Start = Callable[[], "Owner"]


class Owner:
    """Another process that has the store; see `tests.server.store.owner`."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "tests.server.store.owner", str(path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._line() == "open"

    def commit(self) -> str:
        return self.ask("commit")

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        return self._line()

    def stop(self) -> None:
        """Returns when it is stopped."""
        stop(self.process.pid)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    owners: list[Owner] = []

    def start() -> Owner:
        owners.append(Owner(tmp_path))
        return owners[-1]

    yield start
    for owner in owners:
        owner.end()


def never(_: float) -> None:
    raise AssertionError("there was no need to wait")


class Lease:
    """A clock that runs while a store waits; ``meanwhile`` is told the time."""

    def __init__(self, meanwhile: Callable[[float], object] = lambda now_s: None) -> None:
        self.now_s, self._meanwhile = 0.0, meanwhile

    def waiting(self) -> Waiting:
        return Waiting(10.0, lambda: self.now_s, self._sleep)

    def _sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self._meanwhile(self.now_s)


def test_killed_owner_is_replaced_at_once(tmp_path: Path, start: Start) -> None:
    owner = start()
    assert [owner.commit() for _ in range(3)] == ["ok"] * 3
    owner.end()
    store = open_store(tmp_path, IDENTITY, waiting=Waiting(sleep=never))
    assert store.list(None, None, 9)[0].seq == 3
    store.close()


def test_stopped_owner_is_replaced_after_a_lease_and_fenced(tmp_path: Path, start: Start) -> None:
    owner, lease = start(), Lease()
    assert owner.commit() == "ok"
    owner.stop()
    store = open_store(tmp_path, IDENTITY, waiting=lease.waiting())
    assert lease.now_s >= 10.0
    owner.process.send_signal(signal.SIGCONT)
    assert owner.commit() == "store_taken"
    assert owner.commit() == "store_taken"
    store.maintain(0.0)
    writer = Writer("s2")
    store.commit([writer.opened(), *writer.turn(2)])
    assert [(each.id, each.seq) for each in store.list(None, None, 9)] == [("s1", 1), ("s2", 3)]
    store.close()
    assert list(problems(tmp_path)) == []


def test_an_owner_stopped_in_a_commit_is_named_and_keeps_the_store(
    tmp_path: Path, start: Start
) -> None:
    owner = start()
    assert owner.ask("begin") == "begun"
    owner.stop()
    pid = owner.process.pid
    what_to_do = rf"process {pid} .* is stopped .*kill -CONT {pid}\) .*kill -KILL {pid}\)"
    for _ in range(2):
        with pytest.raises(StoreInUse, match=what_to_do):
            open_store(tmp_path, IDENTITY, waiting=Lease().waiting())
    owner.process.send_signal(signal.SIGCONT)
    assert owner.ask("end") == "ok"
    assert owner.commit() == "ok"
    owner.stop()
    owner.end()
    store = open_store(tmp_path, IDENTITY, waiting=Waiting(sleep=never))
    assert store.list(None, None, 9)[0].seq == 2
    store.close()


def test_a_reader_does_not_keep_a_store_from_opening(tmp_path: Path) -> None:
    first, writer = open_store(tmp_path, IDENTITY), Writer()
    first.commit([writer.opened(), *writer.turn(2)])
    with open_for_reading(tmp_path) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM session").fetchone() == (1,)
        first.commit(writer.turn(2))
        first.close()
        again = open_store(tmp_path, IDENTITY, waiting=Waiting(sleep=never))
        again.commit(writer.turn(1))
        again.close()


def test_an_owner_that_is_alive_keeps_the_store(tmp_path: Path) -> None:
    owner = open_store(tmp_path, IDENTITY)
    with pytest.raises(StoreInUse, match=rf"process {os.getpid()} .*name another folder"):
        open_store(tmp_path, IDENTITY, waiting=Lease(owner.maintain).waiting())
    owner.commit([Writer().opened()])
    owner.close()


def test_a_fenced_store_neither_writes_nor_reads(tmp_path: Path) -> None:
    owner, writer = open_store(tmp_path, IDENTITY), Writer()
    owner.commit([writer.opened(), *writer.turn(2)])
    heir = open_store(tmp_path, IDENTITY, waiting=Lease().waiting())
    with pytest.raises(Fenced):
        owner.maintain(0.0)
    with pytest.raises(Fenced):
        owner.commit(writer.turn(1))
    with pytest.raises(Fenced):
        owner.load("s1", "ann")
    owner.close()
    assert heir.store_id == owner.store_id
    assert heir.list(None, None, 9)[0].seq == 3
    heir.close()


def test_new_owner_takes_the_lock_once_it_is_free(tmp_path: Path) -> None:
    owner = open_store(tmp_path, IDENTITY)
    heir = open_store(tmp_path, IDENTITY, waiting=Lease().waiting())
    owner.close()
    heir.maintain(0.0)
    with pytest.raises(StoreInUse):
        open_store(tmp_path, IDENTITY, waiting=Lease(heir.maintain).waiting())
    heir.close()


def test_a_closed_store_is_free_at_once(tmp_path: Path) -> None:
    first = open_store(tmp_path, IDENTITY)
    first.close()
    second = open_store(tmp_path, IDENTITY, waiting=Waiting(sleep=never))
    assert second.store_id == first.store_id
    second.close()
    with pytest.raises(StoreError):
        second.maintain(0.0)
