"""The client for plain code: one socket, used by one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, Unpack, cast

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from clients.python.errors import ConnectionLost
from clients.python.events import Appended, Created, Event, Finished, Started, Token
from clients.python.protocol import (
    Call,
    Completion,
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
        self._open = ExitStack()
        self._socket: ClientConnection | None = None
        self._waiting: dict[str, deque[Event]] = {}

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
        self._http.close()
        self._open.close()
        self._socket = None

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Starts a generation; iterate over it for its tokens and its end."""
        request_id = self._send("generate", prompt=prompt, session=session, keep=keep, **sampling)
        return Generation(self, request_id)

    def create_session(self) -> Session:
        """A kept, empty session."""
        return Session(self, cast(Created, self._ask("create")).session)

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
        return cast(list[dict[str, Any]], self._call(Call("GET", "/v1/models"))["data"])

    def health(self) -> bool:
        """Whether the server is alive."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _call(self, call: Call) -> Any:
        try:
            response = self._http.request(call.method, call.path, json=call.body)
        except httpx.HTTPError as error:
            raise ConnectionLost(f"no answer from {self._protocol.base_url}: {error}") from error
        return self._protocol.answer(response.status_code, response.content, response.headers)

    def _ask(self, kind: str, **fields: object) -> Event:
        """Sends a message that has one answer, and waits for it."""
        request_id = self._send(kind, **fields)
        try:
            return self._protocol.checked(self._next(request_id))
        finally:
            del self._waiting[request_id]

    def _send(self, kind: str, **fields: object) -> str:
        request_id, message = self._protocol.message(kind, **fields)
        self._waiting[request_id] = deque()
        try:
            self._connected().send(message)
        except ConnectionClosed as error:
            raise self._lost(error) from error
        return request_id

    def _next(self, request_id: str) -> Event:
        """The next event of a request; those of others are put aside for them."""
        events = self._waiting[request_id]
        while not events:
            event = self._receive()
            if event is not None and event.request_id in self._waiting:
                self._waiting[event.request_id].append(event)
        return events.popleft()

    def _receive(self) -> Event | None:
        try:
            return self._protocol.event(self._connected().recv(timeout=self._timeout_s))
        except ConnectionClosed as error:
            raise self._lost(error) from error
        except TimeoutError as error:
            raise ConnectionLost(f"no event within {self._timeout_s:g} s") from error

    def _connected(self) -> ClientConnection:
        if self._socket is None:
            try:
                connecting = connect(
                    self._protocol.stream_url,
                    additional_headers=self._protocol.headers,
                    compression=None,
                    max_size=None,
                    open_timeout=self._timeout_s,
                )
                self._socket = self._open.enter_context(connecting)
            except InvalidHandshake as error:
                raise handshake_error(error) from error
            except (OSError, TimeoutError) as error:
                raise ConnectionLost(
                    f"cannot reach {self._protocol.stream_url}: {error}"
                ) from error
        return self._socket

    def _lost(self, error: ConnectionClosed) -> ConnectionLost:
        self._socket = None
        return ConnectionLost(f"the connection ended: {error}")


class Generation:
    """The events of a running generation. Leaving its ``with`` block early cancels it.

    Iterating gives a `Token` for each token and ends with a `Finished`, so that
    the ``text`` of all events joined is the answer. ``started`` is set from the
    first event on.
    """

    def __init__(self, client: Client, request_id: str) -> None:
        self.request_id = request_id
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._client = client

    def __iter__(self) -> Iterator[Token | Finished]:
        client = self._client
        while self.finished is None and self.request_id in client._waiting:
            try:
                event = client._protocol.checked(client._next(self.request_id))
            except Exception:
                client._waiting.pop(self.request_id, None)
                raise
            if isinstance(event, Started):
                self.started = event
            elif isinstance(event, Finished):
                self.finished = event
                del client._waiting[self.request_id]
                yield event
            elif isinstance(event, Token):
                yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def cancel(self) -> Finished | None:
        """Ends it and returns its `Finished`; one that is over is left alone."""
        client = self._client
        if self.finished is None and self.request_id in client._waiting and client._socket:
            client._socket.send(client._protocol.cancel(self.request_id))
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
        return cast(Appended, self._client._ask("append", session=self.id, **{field: text}))

    def generate(
        self, prompt: str | Sequence[int] = "", **sampling: Unpack[Sampling]
    ) -> Generation:
        """Goes on with the session's text, after ``prompt`` if there is one."""
        return self._client.generate(prompt, session=self.id, **sampling)

    def info(self) -> SessionInfo:
        """Position, idle seconds and bytes."""
        return SessionInfo(**self._client._call(Protocol.session(self.id)))

    def delete(self) -> None:
        """Frees its slot."""
        self._client._ask("delete", session=self.id)
