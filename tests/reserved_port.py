"""Ports that are reserved until a server binds them, and from one start of it to the next.

A port that was only found to be free may be taken before the server binds it: the kernel gives it
to whatever asks for any port next, and to the same process when that asks again.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

LOCAL = "127.0.0.1"


class ReservedPort:
    """``number`` is a TCP port of 127.0.0.1 that the kernel assigns to nothing else until `close`.

    A socket that is bound and never listens reserves it: neither a bind to port 0 nor an outgoing
    connection gets it, and connections to it are refused. A server that sets SO_REUSEADDR or
    SO_REUSEPORT can bind it and listen as if it were free, any number of times.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.bind((LOCAL, 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """The kernel may assign the port again."""
        self._socket.close()
