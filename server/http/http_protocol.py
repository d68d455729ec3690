"""HTTP/1.1 as uvicorn has it, with the ends closed that it leaves open.

A peer that never finishes its head or body keeps uvicorn's connections open indefinitely:
here it meets a deadline and `abort`, which needs no cooperation of the peer. Pieces of
an answer are framed and written without h11's event objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from server.api.streaming import Write
from server.http.connection import CountedProtocol, ReadsLittle, RunsApp, refusal
from server.http.websocket_protocol import WebSocketProtocol

__all__ = ["HttpProtocol", "WebSocketProtocol"]

# What a client gets to read the answer to what it has not finished sending.
LINGER_S = 2.0


class StallTimer:
    """Aborts ``transport`` when its peer has taken no byte for ``limit_s``.

    A slow peer that takes something in that time is left alone. Between `start` and
    `stop` nothing is written.
    """

    def __init__(self, transport: asyncio.Transport, limit_s: float) -> None:
        self._transport, self._limit_s = transport, limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0

    def start(self) -> None:
        """Has no effect where it runs."""
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._num_unsent = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() < self._num_unsent:
            self._arm()
        else:
            self._transport.abort()


class HttpProtocol(RunsApp, H11Protocol, ReadsLittle):
    """HTTP/1.1 with deadlines: for each head, a refused body's rest, and the client's reading."""

    head_timeout_s = 10.0
    #: In which it must take some of the kilobytes that wait in our memory, besides the kernel's.
    stall_timeout_s = 20.0
    _deadline: asyncio.TimerHandle | None = None
    _stall: StallTimer
    _refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._stall = StallTimer(self.transport, self.stall_timeout_s)
        self._arm(self.head_timeout_s)

    def buffer_updated(self, nbytes: int) -> None:
        if not self._refused:
            self.data_received(bytes(self._read_buffer[:nbytes]))
            self._set_deadlines()

    def _set_deadlines(self) -> None:
        if self._refused:
            return
        if self._answered_early():
            if self._deadline is None:  # no drop of the rest puts it off
                self._arm(LINGER_S)
        elif self.conn.their_state is not h11.IDLE:
            self._disarm()
        elif self._deadline is None:
            self._arm(self.head_timeout_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if self._deadline is None and (begun or self._answered_early()):
            self._arm(self.head_timeout_s if begun else LINGER_S)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._disarm()
        names = {name for name, _ in self.headers}
        if {b"content-length", b"transfer-encoding"} & names:
            self.send_400_response("a WebSocket handshake has no body")
        else:
            super().handle_websocket_upgrade(event)
            cast(CountedProtocol, self.transport.get_protocol()).connection = self.connection

    def send_400_response(self, msg: str) -> None:
        """Answers to invalid HTTP, and reads on for a while so that the answer arrives.

        Where an answer has begun there is nothing left to say.
        """
        self._refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if self.cycle is not None:  # its app waits for the rest of the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(refusal(msg))
        self.transport.write_eof()
        self._disarm()
        self._arm(LINGER_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.stop()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size() > 0:
            self._stall.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stall.stop()
        super().connection_lost(exc)

    def _watch_answer(self) -> Callable[[], bool]:
        cycle: RequestResponseCycle = self.cycle  # another one when this is answered
        return lambda: cycle.response_started or cycle.disconnected

    def _direct_write(self, scope: Any) -> Write:
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

    def _answered_early(self) -> bool:
        """Then the client may read the answer while it still sends, but not for long."""
        cycle: RequestResponseCycle | None = self.cycle
        answered = cycle is not None and cycle.response_complete
        return answered and self.conn.their_state is h11.SEND_BODY

    def _arm(self, delay_s: float) -> None:
        self._deadline = self.loop.call_later(delay_s, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        self.transport.abort()
