"""A reserved port is there for its server, and for nothing else."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

import pytest

from tests.reserved_port import LOCAL, ReservedPort


def test_no_two_reservations_have_the_same_port() -> None:
    """Of as many ports that are only free, two are the same more often than not."""
    with ExitStack() as stack:
        numbers = [stack.enter_context(ReservedPort()).number for _ in range(200)]
    assert len(set(numbers)) == len(numbers)


def test_bind_of_another_socket_fails() -> None:
    with ReservedPort() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use") as caught:
            other.bind((LOCAL, port.number))
        assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_server_can_listen_again_and_again(option: int) -> None:
    with ReservedPort() as port:
        for _ in range(3):
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
                listener.bind((LOCAL, port.number))
                listener.listen()
                with socket.create_connection((LOCAL, port.number)), listener.accept()[0] as client:
                    assert client.getsockname()[1] == port.number


def test_connections_are_refused_until_the_server_listens() -> None:
    with ReservedPort() as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOCAL, port.number))
