"""How often the store waits for its database: far away, that is what a pause is made of."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from server.store.postgres.store import PostgresStore
from tests.server.cluster.stores import shared_place
from tests.server.store.records import Writer

NUM_SESSIONS = 16


class CountingProxy:
    """Carries one connection after the other, and counts how often it turns around.

    Whatever goes to the server after something has come from it begins a round trip.
    """

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_turns = 0
        self._is_to_server: dict[int, bool] = {}
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
                self._sockets += [client, server]
                for source, target, to_server in ((client, server, True), (server, client, False)):
                    arguments = (id(client), source, target, to_server)
                    threading.Thread(target=self._carry, args=arguments, daemon=True).start()

    def _carry(self, link: int, source: socket.socket, target: socket.socket, out: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.num_turns += out and not self._is_to_server.get(link, False)
                self._is_to_server[link] = out
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def proxy(database_url: str) -> Iterator[CountingProxy]:
    port = urlsplit(database_url).port
    assert port is not None
    with closing(CountingProxy(port)) as proxy:
        yield proxy


def turns(database_url: str, proxy: CountingProxy, num_sessions: int) -> dict[str, int]:
    """Round trips of each call for so many sessions that have a turn at the same time."""
    far = database_url.replace(f":{urlsplit(database_url).port}", f":{proxy.port}")
    place = replace(shared_place(far), direct_url=database_url)  # it shows its presence elsewhere
    found: dict[str, int] = {}

    def count(name: str, call: Callable[[], object]) -> None:
        before = proxy.num_turns
        call()
        found[name] = proxy.num_turns - before

    writers = [Writer(f"s{num_sessions}-{index}") for index in range(num_sessions)]
    with closing(PostgresStore(place)) as store:
        count("open", lambda: store.commit([w.opened() for w in writers]))
        count("begin", lambda: store.commit([w.accepted(key=w.id) for w in writers]))
        count("token", lambda: store.commit([w.token() for w in writers]))
        count("finish", lambda: store.commit([w.finished() for w in writers]))
        store.commit([w.saved() for w in writers])
        count("maintain", lambda: store.maintain(1.0))
        count("release", lambda: store.release(writers[0].id))
        count("load", lambda: store.load(writers[0].id, "ann"))
    return found


def test_round_trips_do_not_grow_with_the_sessions(database_url: str, proxy: CountingProxy) -> None:
    few, many = (turns(database_url, proxy, num) for num in (2, NUM_SESSIONS))
    assert many == few
    assert many["token"] == 1
    assert max(many[name] for name in ("open", "begin", "finish", "release")) <= 3
    assert max(many.values()) <= 8


def test_round_trips_of_a_take_over_do_not_grow_with_the_sessions(
    database_url: str, proxy: CountingProxy
) -> None:
    far = database_url.replace(f":{urlsplit(database_url).port}", f":{proxy.port}")
    found = []
    with closing(PostgresStore(replace(shared_place(far), direct_url=database_url))) as other:
        for num_sessions in (2, NUM_SESSIONS):
            writers = [Writer(f"s{num_sessions}-{index}") for index in range(num_sessions)]
            with closing(PostgresStore(shared_place(database_url))) as one:
                one.commit([w.opened() for w in writers])
                one.commit([w.accepted(key=w.id) for w in writers])
                one.commit([w.token() for w in writers])
                before = proxy.num_turns
                assert other.reclaim(one.key)
                found.append(proxy.num_turns - before)
            for writer in writers:
                assert other.read(writer.id, "ann", 0, 9)[-1].seq == writer.value.seq
    # Not equal: the server may answer the first part of a long message before the rest has come.
    assert max(found) <= 8 < NUM_SESSIONS
