"""HTTP/1.1 and WebSockets as uvicorn has them, with the ends closed that it leaves open."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import StatusLike

from server.api.answers import WRITE_EXTENSION, Write
from server.api.connections import CONNECTION_EXTENSION, OpenConnection
from server.api.errors import FAILED, MethodNotAllowed, error_body, error_headers, outcome
from server.api.gate import HEADER, Reply, answer_with_error, new_request_id
from server.errors import InternalFailure, InvalidRequest, RequestError
from server.runtime.async_engine import Draining

# -------------------------------------------------------------------------------------------------
# What the two protocols of the server share: how they read, write and refuse.


logger = logging.getLogger("everstream.serving")

# Of one connection in one turn of the event loop: hundreds of tiny frames, ten milliseconds.
READ_BYTES = 4 * 1024

_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)


class ReadsLittle(asyncio.BufferedProtocol):
    """Takes `READ_BYTES` at a time: asyncio's own 256 KiB can be 40,000 frames.

    All connections read into one buffer, one after the other: what is in it is
    taken out before the event loop reads again.
    """

    _read_buffer = memoryview(bytearray(READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._read_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        raise NotImplementedError


class CountedProtocol(asyncio.BaseProtocol):
    """Tells ``connection`` when it begins and ends; None where connections are not counted."""

    connection: OpenConnection | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.connection is not None:
            self.connection.made(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.connection is not None:
            self.connection.lost()
        super().connection_lost(exc)


class RunsApp(CountedProtocol):
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
        offered = {
            WRITE_EXTENSION: self._direct_write(scope),
            CONNECTION_EXTENSION: self.connection,
        }
        extensions = {**scope.get("extensions", {}), **offered}
        has_answered = self._watch_answer()
        try:
            await self._app({**in_origin_form(scope), "extensions": extensions}, receive, send)
        except ClientDisconnected:
            raise
        except BaseException as error:  # uvicorn would answer in plain text
            if has_answered():
                raise
            await answer_with_error(scope, Reply(scope, send), _failure(error))
        else:
            if not has_answered():
                logger.error("the application sent no response to %s", scope["path"])
                await answer_with_error(scope, Reply(scope, send), InternalFailure(FAILED))

    def _watch_answer(self) -> Callable[[], bool]:
        """Says of the present request if an answer has begun, or there is no client to get one."""
        raise NotImplementedError

    def _direct_write(self, scope: Any) -> Write:
        raise NotImplementedError


def in_origin_form(scope: dict[str, Any]) -> dict[str, Any]:
    """``scope`` as if the client had sent the path alone, and the target's host as `Host`.

    In the absolute form a request begins with `GET http://host/path` (RFC 9112, 3.2.2).
    """
    found = _ABSOLUTE.fullmatch(scope["raw_path"])
    if found is None:
        return scope
    host, raw_path = found[1], found[2] or b"/"
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "headers": [(b"host", host), *headers],
    }


def _failure(error: BaseException) -> RequestError:
    """What a client gets when the application has ended by ``error``."""
    if isinstance(error, asyncio.CancelledError):  # the server ends, whatever its reason
        return Draining()
    logger.error("the application failed", exc_info=error)
    return InternalFailure(FAILED)


def refusal(message: str) -> bytes:
    """A whole answer with status 400, after which the connection ends."""
    return whole_answer(InvalidRequest(message))


def whole_answer(error: RequestError, status: int | None = None, more: str = "") -> bytes:
    """A whole answer, after which the connection ends. ``more`` are lines of its head."""
    status = outcome(error).status if status is None else status
    body, headers = error_body(error), error_headers(error)
    headers |= {"content-length": str(len(body)), "connection": "close"}
    headers[HEADER] = new_request_id()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
    return f"{first}{lines}{more}\r\n".encode() + body


# -------------------------------------------------------------------------------------------------
# A peer that never reads keeps uvicorn's sockets open indefinitely: here it meets a deadline
# and `abort`, which needs no cooperation of the peer. Tokens are framed and written
# without the libraries' event objects, which are most of a token's cost.


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


# -------------------------------------------------------------------------------------------------
# A peer that never finishes its head or body keeps uvicorn's connections open indefinitely:
# here it meets a deadline and `abort`, which needs no cooperation of the peer. Pieces of
# an answer are framed and written without h11's event objects.


__all__ = ["HttpProtocol", "WebSocketProtocol"]

# What a client gets to read the answer to what it has not finished sending.
LINGER_S = 2.0


class StallTimer:
    """Aborts ``transport`` when its peer has taken no byte for ``limit_s``.

    A slow peer that takes something in that time is left alone. Between `start` and
    `stop` nothing is written.
    """

    def __init__(
        self, transport: asyncio.Transport, limit_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport, self._limit_s, self._loop = transport, limit_s, loop
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
        self._timer = self._loop.call_later(self._limit_s, self._check)

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
        self._stall = StallTimer(self.transport, self.stall_timeout_s, self.loop)
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
