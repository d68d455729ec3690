"""The WebSocket of the client for plain code: one thread sends, reads and waits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from clients.python.errors import ConnectionLost, EverstreamError, ProtocolError
from clients.python.events import Event
from clients.python.inbox import MAX_UNREAD, Farewell, Inboxes
from clients.python.protocol import Answer, Protocol, handshake_error


class Socket:
    """Requests over one connection, which is made when the first of them is sent.

    A request that `start` has begun is over when `is_open` says so.
    """

    def __init__(self, protocol: Protocol, timeout_s: float) -> None:
        self._protocol = protocol
        self._timeout_s = timeout_s
        self._connection: ClientConnection | None = None
        self._to_close = contextlib.ExitStack()
        self._inboxes = Inboxes()
        self._thread = threading.get_ident()
        self._in_use = False
        self._closed = False

    def close(self) -> None:
        """Ends the connection and every request."""
        self._closed = True
        self._disconnect(ConnectionLost("the client was closed"))

    def start(self, request_id: str, message: bytes, follows: bool = False) -> None:
        """Sends a request; see `Inboxes.open` for ``follows``."""
        self._thread = threading.get_ident()
        self._connect()
        self._inboxes.open(request_id, follows=follows)
        try:
            self._send(message)
        except ConnectionClosed as error:
            self._inboxes.abandon(request_id)
            lost = ConnectionLost(f"the connection ended: {error}")
            self._disconnect(lost)
            raise lost from error

    def ask(self, kind: str, answer: type[Answer], **fields: object) -> Answer:
        """Sends a request that has one answer, and waits for it."""
        request_id, message = self._protocol.message(kind, **fields)
        self.start(request_id, message)
        try:
            return self._protocol.expected(self.next(request_id), answer)
        finally:
            self.abandon(request_id)

    def is_open(self, request_id: str) -> bool:
        """Whether `next` may still give something."""
        return self._inboxes.is_open(request_id)

    def next(self, request_id: str) -> Event:
        """The next event of an open request; those of others are put aside for them."""
        deadline = time.monotonic() + self._timeout_s
        while (event := self._inboxes.take(request_id)) is None:
            try:
                self._receive(deadline)
            except TimeoutError as error:
                self._inboxes.abandon(request_id, "detach")
                self._say_farewells()
                raise ConnectionLost(f"no event within {self._timeout_s:g} s") from error
        return self._protocol.checked(event)

    def bid(self, farewell: Farewell) -> None:
        """Asks for the end of a request. Where the socket has ended, its next reader says so."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionClosed):
                self._send(self._protocol.farewell(farewell))

    def abandon(self, request_id: str) -> None:
        """Cancels a request that nobody reads any more, if it still runs."""
        self._inboxes.abandon(request_id)
        self._say_farewells()

    def _receive(self, deadline: float) -> None:
        """Delivers one frame. A socket that ends fails the requests that are open on it."""
        assert self._connection is not None, "its requests failed when it ended"
        try:
            with self._using():
                frame = self._connection.recv(timeout=max(0.0, deadline - time.monotonic()))
            if (event := self._protocol.event(frame)) is not None:
                self._inboxes.deliver(event)
        except ConnectionClosed as error:
            self._disconnect(ConnectionLost(f"the connection ended: {error}"))
        except ProtocolError as error:
            self._disconnect(error)
        self._say_farewells()

    def _send(self, message: bytes) -> None:
        assert self._connection is not None
        with self._using():
            self._connection.send(message, text=True)

    def _say_farewells(self) -> None:
        """Also runs in finalizers, which may interrupt a call that holds the socket's locks.

        There it leaves the work to the end of that call, or to the next one.
        """
        if self._in_use or threading.get_ident() != self._thread:
            return
        while self._inboxes.farewells:
            self.bid(self._inboxes.farewells.popleft())

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False

    def _connect(self) -> None:
        """Makes sure that there is a connection, and that it is open."""
        if self._closed:
            raise ConnectionLost("the client was closed")
        if self._connection is not None and self._connection.protocol.state is not State.OPEN:
            self._disconnect(ConnectionLost("the connection ended"))
        if self._connection is not None:
            return
        try:
            connecting = connect(
                self._protocol.stream_url,
                additional_headers=self._protocol.headers,
                compression=None,
                max_size=None,
                max_queue=MAX_UNREAD,
                open_timeout=self._timeout_s,
            )
            self._connection = self._to_close.enter_context(connecting)
        except InvalidHandshake as error:
            raise handshake_error(error) from error
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"cannot reach {self._protocol.stream_url}: {error}") from error

    def _disconnect(self, reason: EverstreamError) -> None:
        self._connection = None
        self._inboxes.fail(reason)
        self._to_close.close()
