"""Bodies of JSON; those that may be large are sent in pieces as fast as the client reads them."""

from __future__ import annotations

import asyncio

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: What is handed to the connection at once.
PART_BYTES = 1 << 16


def json_response(value: object, status: int = 200) -> Response:
    """``value`` as the body of an answer."""
    return Response(orjson.dumps(value), status, media_type="application/json")


class LargeResponse(Response):
    """A body of JSON that is sent as fast as the client reads it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, [bytes(self.body)])


async def send_whole(send: Send, parts: list[bytes]) -> None:
    """A JSON answer, as fast as the client reads it. ``parts`` are gone when they are sent."""
    length = sum(map(len, parts))
    headers = [(b"content-length", b"%d" % length), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if length > PART_BYTES:
        parts.reverse()
        while parts:
            await send_piece(send, parts.pop())
    await send({"type": "http.response.body", "body": b"".join(parts)})


async def send_piece(send: Send, body: bytes) -> None:
    """A piece of a body that continues, of any size."""
    for start in range(0, len(body), PART_BYTES):
        part = body if len(body) <= PART_BYTES else body[start : start + PART_BYTES]
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0)  # a send to a client that reads does not wait
