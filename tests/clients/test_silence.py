"""A server that only pings is busy, and is waited for; one that is silent is not."""

from __future__ import annotations

import threading
import time

import pytest
from websockets.sync.server import ServerConnection

from clients.python import Client, ConnectionLost
from tests.clients.stub import Message, answering, finished, started

TIMEOUT_S = 2.0


def test_pings_of_a_busy_server_put_the_timeout_off() -> None:
    """As it sends them while it reads a long prompt."""

    def answer(connection: ServerConnection, message: Message) -> None:
        connection.send(started(message))
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < 1.5 * TIMEOUT_S:
            connection.ping()
            threading.Event().wait(TIMEOUT_S / 20)
        connection.send(finished(message, "stop"))

    with answering(answer) as stub, Client(stub.url, timeout_s=TIMEOUT_S) as client:
        client.generate("a long prompt").text()


def test_server_that_falls_silent_after_its_pings_is_an_error() -> None:
    def answer(connection: ServerConnection, message: Message) -> None:
        if message["type"] == "generate":
            connection.send(started(message))
            connection.ping()

    with answering(answer) as stub, Client(stub.url, timeout_s=0.3) as client:
        with pytest.raises(ConnectionLost, match=r"no event within 0\.3 s, and no ping"):
            client.generate("a").text()
        assert stub.next_message("detach")
