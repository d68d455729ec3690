"""The client for plain code: one socket, used by one thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from clients.python.errors import ConnectionLost, EverstreamError, ProtocolError
from clients.python.events import Appended, Created, Deleted, Event, Finished, Token
from clients.python.inbox import MAX_UNREAD, Inboxes
from clients.python.protocol import (
    Answer,
    Call,
    Completion,
    Progress,
    Protocol,
    Sampling,
    SessionInfo,
    handshake_error,
)


class Client:
    """Talks to the server at ``url``. Use it as a context manager, or call `close`.

    ``timeout_s`` bounds the wait for each event and each HTTP answer. Every
    method raises `EverstreamError` where something goes wrong.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._protocol = Protocol(url, api_key)
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self._protocol.base_url, headers=self._protocol.headers, timeout=timeout_s
        )
        self._socket: ClientConnection | None = None
        self._to_close = contextlib.ExitStack()
        self._inboxes = Inboxes()
        self._thread = threading.get_ident()
        self._on_socket = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections; what runs on them is cancelled by the server."""
        self._closed = True
        self._http.close()
        self._disconnect(ConnectionLost("the client was closed"))

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Starts a generation; iterate over it for its tokens and its end."""
        request_id = self._start("generate", prompt=prompt, session=session, keep=keep, **sampling)
        return Generation(self, request_id)

    def create_session(self) -> Session:
        """A kept, empty session."""
        return Session(self, self._ask("create", Created).session)

    def session(self, session: str) -> Session:
        """A session by its id; nothing is asked of the server yet."""
        return Session(self, session)

    def complete(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """A whole answer at once, over HTTP."""
        call = self._protocol.complete(prompt, session=session, keep=keep, **sampling)
        return self._protocol.completion(self._call(call))

    def models(self) -> list[dict[str, Any]]:
        """The ``data`` of ``/v1/models``."""
        return self._protocol.models(self._call(Call("GET", "/v1/models")))

    def health(self) -> bool:
        """Whether the server is alive."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _call(self, call: Call) -> Any:
        try:
            response = self._http.request(
                call.method, call.path, content=call.body, headers=call.headers
            )
        except httpx.HTTPError as error:
            raise ConnectionLost(f"no answer from {self._protocol.base_url}: {error}") from error
        return self._protocol.answer(response.status_code, response.content, response.headers)

    def _ask(self, kind: str, answer: type[Answer], **fields: object) -> Answer:
        """Sends a message that has one answer, and waits for it."""
        request_id = self._start(kind, **fields)
        try:
            return self._protocol.expected(self._next(request_id), answer)
        finally:
            self._abandon(request_id)

    def _start(self, kind: str, **fields: object) -> str:
        request_id, message = self._protocol.message(kind, **fields)
        self._thread = threading.get_ident()
        self._connect()
        self._inboxes.open(request_id)
        try:
            self._send(message)
        except ConnectionClosed as error:
            self._inboxes.abandon(request_id)
            lost = ConnectionLost(f"the connection ended: {error}")
            self._disconnect(lost)
            raise lost from error
        return request_id

    def _next(self, request_id: str) -> Event:
        """The next event of an open request; those of others are put aside for them."""
        deadline = time.monotonic() + self._timeout_s
        while (event := self._inboxes.take(request_id)) is None:
            try:
                self._receive(deadline)
            except TimeoutError as error:
                self._abandon(request_id)
                raise ConnectionLost(f"no event within {self._timeout_s:g} s") from error
        return self._protocol.checked(event)

    def _receive(self, deadline: float) -> None:
        """Delivers one frame. A socket that ends fails the requests that are open on it."""
        assert self._socket is not None, "its requests failed when it ended"
        try:
            with self._socket_in_use():
                frame = self._socket.recv(timeout=max(0.0, deadline - time.monotonic()))
            if (event := self._protocol.event(frame)) is not None:
                self._inboxes.deliver(event)
        except ConnectionClosed as error:
            self._disconnect(ConnectionLost(f"the connection ended: {error}"))
        except ProtocolError as error:
            self._disconnect(error)
        self._cancel_abandoned()

    def _send(self, message: bytes) -> None:
        assert self._socket is not None
        with self._socket_in_use():
            self._socket.send(message, text=True)

    def _cancel(self, request_id: str) -> None:
        """Asks for an end. Where the socket has ended, its next reader says so."""
        if self._socket is not None:
            with contextlib.suppress(ConnectionClosed):
                self._send(self._protocol.cancel(request_id))

    def _abandon(self, request_id: str) -> None:
        """Cancels a request that nobody reads any more, if it still runs."""
        self._inboxes.abandon(request_id)
        self._cancel_abandoned()

    def _cancel_abandoned(self) -> None:
        """Also runs in finalizers, which may interrupt a call that holds the socket's locks.

        There it leaves the work to the end of that call, or to the next one.
        """
        if self._on_socket or threading.get_ident() != self._thread:
            return
        while self._inboxes.abandoned:
            self._cancel(self._inboxes.abandoned.popleft())

    @contextlib.contextmanager
    def _socket_in_use(self) -> Iterator[None]:
        self._on_socket = True
        try:
            yield
        finally:
            self._on_socket = False

    def _connect(self) -> None:
        """Makes sure that there is a socket, and that it is open."""
        if self._closed:
            raise ConnectionLost("the client was closed")
        if self._socket is not None and self._socket.protocol.state is not State.OPEN:
            self._disconnect(ConnectionLost("the connection ended"))
        if self._socket is not None:
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
            self._socket = self._to_close.enter_context(connecting)
        except InvalidHandshake as error:
            raise handshake_error(error) from error
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"cannot reach {self._protocol.stream_url}: {error}") from error

    def _disconnect(self, reason: EverstreamError) -> None:
        self._socket = None
        self._inboxes.fail(reason)
        self._to_close.close()


class Generation(Progress):
    """The events of a running generation, once over.

    Iterating gives a `Token` for each token and ends with a `Finished`, so that
    the ``text`` of all events joined is the answer. ``started`` is set from the
    first event on. Leaving its ``with`` block, or dropping it, as a ``for`` over
    it does that is left early, cancels what still runs.
    """

    def __init__(self, client: Client, request_id: str) -> None:
        super().__init__(request_id)
        self._client = client

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token | Finished:
        while self._client._inboxes.is_open(self.request_id):
            if (event := self._note(self._client._next(self.request_id))) is not None:
                return event
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.cancel()
        except EverstreamError:
            if kind is None:
                raise

    def __del__(self) -> None:
        self._client._abandon(self.request_id)

    def cancel(self) -> Finished | None:
        """Ends it and returns its `Finished`; one that is over is left alone."""
        if self._client._inboxes.is_open(self.request_id):
            self._client._cancel(self.request_id)
            for _ in self:
                pass
        return self.finished

    def text(self) -> str:
        """All of the text, when it is there."""
        return "".join(event.text for event in self)


class Session:
    """A kept session: constant memory on the server until it is deleted or expires."""

    def __init__(self, client: Client, session: str) -> None:
        self.id = session
        self._client = client

    def append(self, text: str | Sequence[int]) -> Appended:
        """Lets the session read ``text``, or token ids, without generating."""
        field = "text" if isinstance(text, str) else "tokens"
        return self._client._ask("append", Appended, session=self.id, **{field: text})

    def generate(
        self, prompt: str | Sequence[int] = "", **sampling: Unpack[Sampling]
    ) -> Generation:
        """Goes on with the session's text, after ``prompt`` if there is one."""
        return self._client.generate(prompt, session=self.id, **sampling)

    def info(self) -> SessionInfo:
        """Position, idle seconds and bytes."""
        return Protocol.session_info(self._client._call(Protocol.session(self.id)))

    def delete(self) -> None:
        """Frees its slot."""
        self._client._ask("delete", Deleted, session=self.id)
