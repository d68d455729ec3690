"""What the two protocols of the server share: how they read, write and refuse."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

from uvicorn.protocols.utils import ClientDisconnected

from server.api.errors import FAILED, error_body, error_headers, outcome
from server.api.middleware.connections import CONNECTION_EXTENSION, OpenConnection
from server.api.middleware.replies import HEADER, Reply, answer_with_error, new_request_id
from server.api.streaming import WRITE_EXTENSION, Write
from server.errors import InternalFailure, InvalidRequest, RequestError
from server.runtime.async_engine import Draining

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
