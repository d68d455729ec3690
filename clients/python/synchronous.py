"""The client for plain code: one socket, used by one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from clients.python import calls
from clients.python.calls import Call, Completion, ListedSession, SessionInfo
from clients.python.errors import ConnectionLost, EverstreamError
from clients.python.events import (
    Appended,
    Created,
    Deleted,
    Finished,
    Forked,
    Rewound,
    Token,
)
from clients.python.inbox import Farewell
from clients.python.protocol import Progress, Protocol, Sampling
from clients.python.sync_socket import Socket

T = TypeVar("T")


class Client:
    """Talks to the server at ``url``. Use it as a context manager, or call `close`.

    ``timeout_s`` bounds the wait for each event and each HTTP answer. Every
    method raises `EverstreamError` where something goes wrong.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._protocol = Protocol(url, api_key)
        self._socket = Socket(self._protocol, timeout_s)
        self._http = httpx.Client(
            base_url=self._protocol.base_url, headers=self._protocol.headers, timeout=timeout_s
        )

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
        """Ends the connections. What runs in kept sessions goes on for a while: see `resume`."""
        self._http.close()
        self._socket.close()

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        idempotency_key: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Starts a generation; iterate over it for its tokens and its end.

        One whose ``idempotency_key`` the server has seen is read again instead.
        """
        request_id, message = self._protocol.message(
            "generate",
            prompt=prompt,
            session=session,
            keep=keep,
            idempotency_key=idempotency_key,
            **sampling,
        )
        self._socket.start(request_id, message)
        return Generation(self._socket, request_id)

    def resume(
        self, session: str, last_seq: int, epoch: str | None = None, take_over: bool = False
    ) -> Generation:
        """The events of a session after ``last_seq``: those that were missed, then live ones.

        They are of one generation or of several, and end with what runs. Raises
        `SessionReset` where the events are gone or ``epoch`` is over, and
        `SessionAttached` where somebody else reads them, unless you ``take_over``.
        """
        request_id, message = self._protocol.message(
            "resume", session=session, last_seq=last_seq, epoch=epoch, take_over=take_over
        )
        self._socket.start(request_id, message, follows=True)
        generation = Generation(self._socket, request_id)
        generation._note(self._socket.next(request_id))
        return generation

    def create_session(self) -> Session:
        """A kept, empty session."""
        return Session(self, self._socket.ask("create", Created).session)

    def session(self, session: str) -> Session:
        """A session by its id; nothing is asked of the server yet."""
        return Session(self, session)

    def sessions(self, page_size: int = 100) -> Iterator[ListedSession]:
        """All of the caller's kept sessions by id, those that sleep too."""
        after: str | None = None
        while True:
            page = self._call(calls.sessions(after, page_size))
            yield from page.sessions
            if (after := page.after) is None:
                return

    def import_session(self, data: bytes) -> Session:
        """A new session from what `Session.export` gave, here or on another server."""
        return Session(self, self._call(calls.import_session(data)))

    def complete(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        idempotency_key: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """A whole answer at once, over HTTP."""
        return self._call(
            calls.complete(
                prompt, session=session, keep=keep, idempotency_key=idempotency_key, **sampling
            )
        )

    def models(self) -> list[dict[str, Any]]:
        """The ``data`` of ``/v1/models``."""
        return self._call(calls.models())

    def health(self) -> bool:
        """Whether the server is alive."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _call(self, call: Call[T]) -> T:
        try:
            response = self._http.request(
                call.method, call.path, content=call.body, headers=call.headers
            )
        except httpx.HTTPError as error:
            raise ConnectionLost(f"no answer from {self._protocol.base_url}: {error}") from error
        return call.result(response.status_code, response.content, response.headers)


class Generation(Progress):
    """The events of a running generation, once over.

    Iterating gives a `Token` for each token and ends with a `Finished`, so that
    the ``text`` of all events joined is the answer. ``started`` is set from the
    first event on, or ``resumed`` where it is read again. Leaving its ``with``
    block, or dropping it, as a ``for`` over it does that is left early, cancels
    what still runs; `detach` it first where it shall go on.
    """

    def __init__(self, socket: Socket, request_id: str) -> None:
        super().__init__(request_id)
        self._socket = socket

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token | Finished:
        while self._socket.is_open(self.request_id):
            if (event := self._note(self._socket.next(self.request_id))) is not None:
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
        self._socket.abandon(self.request_id)

    def cancel(self) -> Finished | None:
        """Ends it and returns its `Finished`; one that is over is left alone."""
        if self._socket.is_open(self.request_id):
            self._socket.bid(Farewell("cancel", self.request_id))
            for _ in self:
                pass
        return self.finished

    def detach(self) -> None:
        """Leaves it to go on by itself, if its session is kept, and ends the iteration.

        What has not been read is still there for `Client.resume`, from ``last_seq`` on.
        """
        if self._socket.is_open(self.request_id):
            self._socket.bid(Farewell("detach", self.request_id))
            while self._socket.is_open(self.request_id):
                self._socket.next(self.request_id)

    def text(self) -> str:
        """All of the text, when it is there."""
        return "".join(event.text for event in self)


class Session:
    """A kept session: constant memory on the server until it is deleted or expires."""

    def __init__(self, client: Client, session: str) -> None:
        self.id = session
        self._client = client
        self._socket = client._socket

    def append(
        self,
        text: str | Sequence[int],
        *,
        logprobs: bool = False,
        idempotency_key: str | None = None,
    ) -> Appended:
        """Lets the session read ``text``, or token ids, without generating.

        With ``logprobs`` the answer says how probable each token was. What comes
        twice under one ``idempotency_key`` is read once, and answered twice.
        """
        return self._socket.ask(
            "append",
            Appended,
            session=self.id,
            logprobs=logprobs or None,
            idempotency_key=idempotency_key,
            **Protocol.fed(text),
        )

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        idempotency_key: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Goes on with the session's text, after ``prompt`` if there is one."""
        return self._client.generate(
            prompt, session=self.id, idempotency_key=idempotency_key, **sampling
        )

    def fork(self, n: int = 1, at: int | None = None) -> list[Session]:
        """``n`` copies, as the session is, or as it was when it had ``at`` tokens."""
        forked = self._socket.ask("fork", Forked, session=self.id, n=n, at=at)
        return [Session(self._client, session) for session in forked.sessions]

    def rewind(self, at: int) -> Rewound:
        """Cuts the text back to ``at`` tokens; the session's epoch is a new one."""
        return self._socket.ask("rewind", Rewound, session=self.id, at=at)

    def cancel(self) -> SessionInfo:
        """Ends what the session runs, also where nobody reads it."""
        return self._client._call(calls.cancel_session(self.id))

    def info(self) -> SessionInfo:
        """Position, epoch, idle seconds and bytes."""
        return self._client._call(calls.session_info(self.id))

    def export(self) -> bytes:
        """The session as it is now, as one signed file."""
        return self._client._call(calls.export_session(self.id))

    def delete(self) -> None:
        """Forgets it."""
        self._socket.ask("delete", Deleted, session=self.id)
