"""One response of server-sent events: its head, its pieces, and its end.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.types import Send

from server.api.json_response import PART_BYTES, send_piece
from server.errors import RequestError

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


async def send_stream(
    send: Send, pieces: AsyncGenerator[bytes, None], error: Callable[[RequestError], bytes]
) -> None:
    """Sends ``pieces`` as fast as the client reads them, those that are not empty.

    ``error`` writes what ends the stream where they raise a `RequestError`.
    """
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if len(piece) > PART_BYTES:
                    await send_piece(send, piece)
                elif piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
    except RequestError as ended_by:
        await send_piece(send, error(ended_by))
    await send({"type": "http.response.body", "body": b""})


def server_sent(data: bytes, kind: bytes | None = None, id: bytes | None = None) -> bytes:
    """One server-sent event of JSON, which has no line breaks."""
    head = b"" if id is None else b"id: %b\n" % id
    if kind is not None:
        head += b"event: %b\n" % kind
    return b"%bdata: %b\n\n" % (head, data)
