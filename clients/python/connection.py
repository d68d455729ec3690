"""One WebSocket to the server: how it is opened, and what its close code means."""

from __future__ import annotations

from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from .errors import ConnectionLost
from .protocol import Protocol, handshake_error

#: Close codes after which the next connection may succeed: the server or the network failed.
PASSING_CODES = (1001, 1005, 1006, 1011, 1012, 1013, 1015)
NO_CODE = 1006


class Connection(ClientConnection):
    """A connection that notes when anything has arrived: an event, or a ping of the server.

    ``heard_s`` is in seconds of the event loop's clock.
    """

    heard_s: float = 0.0

    def data_received(self, data: Any) -> None:
        self.heard_s = self.loop.time()
        super().data_received(data)


async def dial(protocol: Protocol, timeout_s: float) -> Connection:
    """Opens a connection. Raises `ConnectionLost`, or the error with which the server refuses."""
    try:
        connection = await connect(
            protocol.stream_url,
            create_connection=Connection,
            additional_headers=protocol.headers,
            compression=None,
            max_size=None,
            open_timeout=timeout_s,
        )
        assert isinstance(connection, Connection)
        return connection
    except InvalidHandshake as error:
        raise handshake_error(error) from error
    except (OSError, EOFError, TimeoutError) as error:
        raise ConnectionLost(f"cannot reach {protocol.stream_url}: {error}") from error


def is_for_good(closed: ConnectionClosed) -> bool:
    """Returns whether the next connection would end in the same way."""
    end = closed.rcvd or closed.sent
    return (NO_CODE if end is None else end.code) not in PASSING_CODES
