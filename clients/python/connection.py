"""One WebSocket to the server: how it is made, and what its end means."""

from __future__ import annotations

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from .errors import ConnectionLost
from .protocol import Protocol, handshake_error

#: Ends that say nothing against the next connection: the server or the network went away.
PASSING_CODES = (1001, 1005, 1006, 1011, 1012, 1013, 1015)
NO_CODE = 1006


async def dial(protocol: Protocol, timeout_s: float) -> ClientConnection:
    """A new connection. Raises `ConnectionLost`, or what the server said in its refusal."""
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
    """Whether the next connection would end in the same way."""
    end = closed.rcvd or closed.sent
    return (NO_CODE if end is None else end.code) not in PASSING_CODES
