"""uvicorn's protocols with the ends that they leave open closed.

A peer that never reads keeps uvicorn's sockets for ever, and one that never
finishes its head or body as well: here both meet a deadline and `abort`, which
needs nobody's cooperation. Both offer `server.api.shortcut`: bytes are framed and
written without the libraries' event objects, which are most of a token's cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from server.api.shortcut import EXTENSION, Write

# What a client gets to read the answer to a body that it has not finished sending.
LINGER_S = 2.0


class _OffersShortcut:
    """Wraps the app that uvicorn sets and calls.

    The app gets a copy of its scope, so that nothing refers in a circle to the
    protocol, and a connection's memory is free as soon as it ends.
    """

    _app: Any

    @property
    def app(self) -> Any:
        return self._run_app

    @app.setter
    def app(self, app: Any) -> None:
        self._app = app

    async def _run_app(self, scope: Any, receive: Any, send: Any) -> None:
        extensions = {**scope.get("extensions", {}), EXTENSION: self._shortcut(scope)}
        await self._app({**scope, "extensions": extensions}, receive, send)

    def _shortcut(self, scope: Any) -> Write:
        raise NotImplementedError


class HttpProtocol(_OffersShortcut, H11Protocol):
    """HTTP/1.1 with a deadline for each request head, and for what is left of a refused body."""

    head_timeout_s = 10.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._arm(self.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._disarm()
        elif self._deadline is None:
            self._arm(self.head_timeout_s)
        self._linger()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if begun and self._deadline is None:
            self._arm(self.head_timeout_s)
        self._linger()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._disarm()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _shortcut(self, scope: Any) -> Write:
        cycle: RequestResponseCycle = self.cycle
        chunked = scope["http_version"] == "1.1"

        def write(parts: Sequence[bytes]) -> bool:
            """One chunk (RFC 9112, section 7.1); h11 keeps no count of them."""
            begun = cycle.response_started and not cycle.response_complete
            if not chunked or not begun or cycle.disconnected or self.flow.write_paused:
                return False
            if self.transport.is_closing():
                return False
            if data := b"".join(parts):  # an empty chunk would be the last
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return True

        return write

    def _linger(self) -> None:
        """After an early answer the client may read it while it still sends, but not for long."""
        cycle: RequestResponseCycle | None = self.cycle
        answered = cycle is not None and cycle.response_complete
        if answered and self.conn.their_state is h11.SEND_BODY and self._deadline is None:
            self._arm(LINGER_S)

    def _arm(self, delay_s: float) -> None:
        self._deadline = self.loop.call_later(delay_s, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        self.transport.abort()


class WebSocketProtocol(_OffersShortcut, WebSocketsSansIOProtocol):
    """WebSockets whose peer cannot hold them open by not reading."""

    close_timeout_s = 5.0

    def handle_ping(self) -> None:
        """Pongs that a peer does not read would pile up in memory."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.transport.abort()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._abort_if_stuck()

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.close" and self._is_open():
            self._close(message)
        else:
            await super().send(message)

    def _is_open(self) -> bool:
        return (
            self.handshake_complete
            and not self.close_sent
            and not self.disconnected
            and not self.transport.is_closing()
            and self.conn.state is State.OPEN
        )

    def _shortcut(self, scope: Any) -> Write:
        return self._write_texts

    def _write_texts(self, payloads: Sequence[bytes]) -> bool:
        """Writes unmasked text frames (RFC 6455, section 5.2)."""
        if not self._is_open() or not self.writable.is_set():
            return False
        parts: list[bytes] = []
        for payload in payloads:
            parts.append(_text_head(len(payload)))
            parts.append(payload)
        self.transport.write(b"".join(parts))
        return True

    def _close(self, message: Any) -> None:
        """Queues the close frame whether or not the peer reads; it has `close_timeout_s` to."""
        code, reason = message.get("code", 1000), message.get("reason") or ""
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(self.close_timeout_s, self.transport.abort)

    def _abort_if_stuck(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()


_SHORT_HEADS = tuple(bytes((0x81, size)) for size in range(126))


def _text_head(size: int) -> bytes:
    """What comes before a text of ``size`` bytes."""
    if size < 126:
        return _SHORT_HEADS[size]
    return b"\x81\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x81\x7f" + size.to_bytes(8)
