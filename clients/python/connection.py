"""One WebSocket to the server: how it is opened, and what its close code means."""

from __future__ import annotations

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from .errors import ConnectionLost
from .protocol import Protocol, handshake_error

#: Close codes after which the next connection may succeed: the server or the network failed.
PASSING_CODES = (1001, 1005, 1006, 1011, 1012, 1013, 1015)
NO_CODE = 1006


async def dial(protocol: Protocol, timeout_s: float) -> ClientConnection:
    """Opens a connection. Raises `ConnectionLost`, or the error with which the server refuses."""
    try:
        return await connect(
            protocol.stream_url,
            additional_headers=protocol.headers,
            compression=None,
            max_size=None,
            open_timeout=timeout_s,
        )
    except InvalidHandshake as error:
        raise handshake_error(error) from error
    except (OSError, EOFError, TimeoutError) as error:
        raise ConnectionLost(f"cannot reach {protocol.stream_url}: {error}") from error


def is_for_good(closed: ConnectionClosed) -> bool:
    """Returns whether the next connection would end in the same way."""
    end = closed.rcvd or closed.sent
    return (NO_CODE if end is None else end.code) not in PASSING_CODES
