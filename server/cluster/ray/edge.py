"""Our side of Ray's proxy: the bound that its sockets lack, and which replica answered."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REPLICA_HEADER = b"everstream-replica"


class Edge:
    """The application behind Ray's proxy, which takes messages of 16 MiB."""

    def __init__(self, app: ASGIApp, tag: str, max_message_bytes: int) -> None:
        self._app, self._tag, self._max_bytes = app, tag.encode(), max_message_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            receive = self._bounded(receive, send)
        await self._app(scope, receive, self._signed(send))

    def _signed(self, send: Send) -> Send:
        async def signed(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                headers = [*message.get("headers", ()), (REPLICA_HEADER, self._tag)]
                message = {**message, "headers": headers}
            await send(message)

        return signed

    def _bounded(self, receive: Receive, send: Send) -> Receive:
        async def bounded() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and _size(message) > self._max_bytes:
                await send({"type": "websocket.close", "code": 1009, "reason": "too large"})
                return {"type": "websocket.disconnect", "code": 1009}
            return message

        return bounded


def _size(message: Message) -> int:
    if message.get("bytes") is not None:
        return len(message["bytes"])
    text: str = message.get("text") or ""
    return len(text.encode())
