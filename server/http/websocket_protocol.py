"""WebSockets as uvicorn has them, with the ends closed that it leaves open.

A peer that never reads keeps uvicorn's sockets open indefinitely: here it meets a deadline
and `abort`, which needs no cooperation of the peer. Tokens are framed and written
without the libraries' event objects, which are most of a token's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import StatusLike

from server.api.errors import MethodNotAllowed, error_body
from server.api.streaming import Write
from server.errors import InternalFailure, InvalidRequest
from server.http.connection import ReadsLittle, RunsApp, refusal, whole_answer
from server.runtime.async_engine import Draining

# Of one message. An empty one costs as much time as a full one.
MAX_FRAGMENTS = 4096


class Handshake(ServerProtocol):
    """Refuses handshakes with the body that all errors have; the library's is plain text."""

    def reject(self, status: StatusLike, text: str) -> Response:
        message = text.partition("\n")[0] or "no socket is taken here"
        known = {405: MethodNotAllowed(), 500: InternalFailure(message)}
        error = known.get(int(status), InvalidRequest(message))
        response = super().reject(status, error_body(error).decode())
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response


class WebSocketProtocol(RunsApp, WebSocketsSansIOProtocol, ReadsLittle):
    """WebSockets whose peer cannot hold them open by not reading."""

    close_timeout_s = 5.0
    _refused = False
    _num_fragments = 0
    _joined: bytearray | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_handshake()

    def handle_cont(self, event: Frame) -> None:
        """Joins as it goes: a million bytes must not become a million objects."""
        self._num_fragments = 0 if event.fin else self._num_fragments + 1
        if self._num_fragments > MAX_FRAGMENTS and self._is_open():
            self._close({"code": CloseCode.POLICY_VIOLATION, "reason": "too many fragments"})
        if self.close_sent:
            return
        if self._joined is None:
            self._joined = bytearray(self.frames[0])
        self._joined += event.data
        if event.fin:
            self.frames, self._joined = [bytes(self._joined)], None
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Refuses text that is not UTF-8 without uvicorn's traceback: it is not our failure."""
        try:
            if self.curr_msg_data_type == "text" and not self.close_sent:
                self.frames[0].decode()
        except UnicodeDecodeError:
            self.conn.fail(CloseCode.INVALID_DATA)
            self.handle_parser_exception()
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Says what was wrong and continues reading until the peer has seen it.

        To close at once would be a reset for a peer that still sends, and the
        reason would be lost.
        """
        if self.close_sent:
            if not self._refused:
                self.transport.close()
            return
        self._refused = True
        reason = self.conn.close_sent
        assert reason is not None
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": reason.code, "reason": reason.reason}
        )
        self._write_close()
        self.transport.write_eof()

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        if self.close_timer is None:
            self._arm_close()

    def handle_ping(self) -> None:
        """Pongs that a peer does not read would pile up in memory."""
        if not self.writable.is_set():
            self.transport.abort()
        elif not self.conn.eof_sent:  # else the pong leaves with the close frame, or not at all
            super().handle_ping()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._abort_if_stuck()

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.close" and self._is_open():
            self._close(message)
            return
        await self.writable.wait()
        if self.close_sent or self.transport.is_closing():  # the app cannot know
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # by a refusal; uvicorn would log that it never was

    def _refuse_handshake(self) -> None:
        """Where h11 took a head that is too long for websockets, uvicorn would wait forever."""
        if not self._refused:
            self._refused = True
            self.transport.write(refusal("a WebSocket handshake needs fewer and shorter headers"))
            self.transport.write_eof()
            self.close_sent = True
            self._arm_close()

    def _is_open(self) -> bool:
        return (
            self.handshake_complete
            and not self.close_sent
            and not self.disconnected
            and not self.transport.is_closing()
            and self.conn.state is State.OPEN
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Handshake(max_size=self.config.ws_max_size, logger=self.logger)

    def send_500_response(self) -> None:
        """For a handshake that the server's end cuts short."""
        if not self.handshake_complete and self.initial_response is None:
            self.transport.write(whole_answer(Draining()))
            self.handshake_complete = self.close_sent = True

    def _watch_answer(self) -> Callable[[], bool]:
        return self._has_answered

    def _has_answered(self) -> bool:
        answered = self.handshake_complete or self.initial_response is not None
        return answered or self.disconnected

    def _direct_write(self, scope: Any) -> Write:
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
        self._write_close()

    def _write_close(self) -> None:
        """Sends what is due and takes no more; the peer has `close_timeout_s` to read it."""
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self._arm_close()

    def _arm_close(self) -> None:
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
