"""The client for asyncio: many generations over one socket, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from clients.python import calls
from clients.python.async_socket import AsyncSocket
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

T = TypeVar("T")


class AsyncClient:
    """`clients.python.Client` with ``await``; all methods belong to one event loop."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._protocol = Protocol(url, api_key)
        self._socket = AsyncSocket(self._protocol, timeout_s)
        self._http = httpx.AsyncClient(
            base_url=self._protocol.base_url, headers=self._protocol.headers, timeout=timeout_s
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections. What runs in kept sessions goes on for a while: see `resume`."""
        await self._http.aclose()
        await self._socket.close()

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        idempotency_key: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGeneration:
        """A generation; iterate over it for its tokens and its end.

        It starts when it is awaited, entered with ``async with``, or first
        iterated. One whose ``idempotency_key`` the server has seen is read again
        instead.
        """
        request_id, message = self._protocol.message(
            "generate",
            prompt=prompt,
            session=session,
            keep=keep,
            idempotency_key=idempotency_key,
            **sampling,
        )
        return AsyncGeneration(self._socket, request_id, message)

    async def resume(
        self, session: str, last_seq: int, epoch: str | None = None, take_over: bool = False
    ) -> AsyncGeneration:
        """The events of a session after ``last_seq``: those that were missed, then live ones.

        They are of one generation or of several, and end with what runs. Raises
        `SessionReset` where the events are gone or ``epoch`` is over, and
        `SessionAttached` where somebody else reads them, unless you ``take_over``.
        """
        request_id, message = self._protocol.message(
            "resume", session=session, last_seq=last_seq, epoch=epoch, take_over=take_over
        )
        generation = AsyncGeneration(self._socket, request_id, message, follows=True)
        await generation
        generation._note(await self._socket.next(request_id, generation._arrived))
        return generation

    async def create_session(self) -> AsyncSession:
        """A kept, empty session."""
        return AsyncSession(self, (await self._socket.ask("create", Created)).session)

    def session(self, session: str) -> AsyncSession:
        """A session by its id; nothing is asked of the server yet."""
        return AsyncSession(self, session)

    async def sessions(self, page_size: int = 100) -> AsyncIterator[ListedSession]:
        """All of the caller's kept sessions by id, those that sleep too."""
        after: str | None = None
        while True:
            page = await self._call(calls.sessions(after, page_size))
            for session in page.sessions:
                yield session
            if (after := page.after) is None:
                return

    async def import_session(self, data: bytes) -> AsyncSession:
        """A new session from what `AsyncSession.export` gave, here or on another server."""
        return AsyncSession(self, await self._call(calls.import_session(data)))

    async def complete(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        idempotency_key: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """A whole answer at once, over HTTP."""
        return await self._call(
            calls.complete(
                prompt, session=session, keep=keep, idempotency_key=idempotency_key, **sampling
            )
        )

    async def models(self) -> list[dict[str, Any]]:
        """The ``data`` of ``/v1/models``."""
        return await self._call(calls.models())

    async def health(self) -> bool:
        """Whether the server is alive."""
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _call(self, call: Call[T]) -> T:
        try:
            response = await self._http.request(
                call.method, call.path, content=call.body, headers=call.headers
            )
        except httpx.HTTPError as error:
            raise ConnectionLost(f"no answer from {self._protocol.base_url}: {error}") from error
        return call.result(response.status_code, response.content, response.headers)


class AsyncGeneration(Progress):
    """The events of a generation, once over.

    Iterating gives a `Token` for each token and ends with a `Finished`, so that
    the ``text`` of all events joined is the answer. ``started`` is set from the
    first event on, or ``resumed`` where it is read again. Leaving its ``async
    with`` block, or dropping it, as an ``async for`` over it does that is left
    early, cancels what still runs; `detach` it first where it shall go on.
    """

    def __init__(
        self, socket: AsyncSocket, request_id: str, message: bytes, follows: bool = False
    ) -> None:
        super().__init__(request_id)
        self._socket = socket
        self._unsent: bytes | None = message
        self._follows = follows
        self._arrived = asyncio.Event()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token | Finished:
        await self._start()
        while self._socket.is_open(self.request_id):
            event = self._note(await self._socket.next(self.request_id, self._arrived))
            if event is not None:
                return event
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.cancel()
        except EverstreamError:
            if kind is None:
                raise

    def __del__(self) -> None:
        self._socket.abandon(self.request_id)

    async def cancel(self) -> Finished | None:
        """Ends it and returns its `Finished`; one that is over is left alone."""
        self._unsent = None
        if self._socket.is_open(self.request_id):
            await self._socket.bid(Farewell("cancel", self.request_id))
            async for _ in self:
                pass
        return self.finished

    async def detach(self) -> None:
        """Leaves it to go on by itself, if its session is kept, and ends the iteration.

        What has not been read is still there for `AsyncClient.resume`, from
        ``last_seq`` on.
        """
        await self._start()
        if self._socket.is_open(self.request_id):
            await self._socket.bid(Farewell("detach", self.request_id))
            while self._socket.is_open(self.request_id):
                await self._socket.next(self.request_id, self._arrived)

    async def text(self) -> str:
        """All of the text, when it is there."""
        return "".join([event.text async for event in self])

    async def _start(self) -> None:
        message, self._unsent = self._unsent, None
        if message is not None:
            await self._socket.start(self.request_id, message, self._arrived, self._follows)


class AsyncSession:
    """A kept session: constant memory on the server until it is deleted or expires."""

    def __init__(self, client: AsyncClient, session: str) -> None:
        self.id = session
        self._client = client
        self._socket = client._socket

    async def append(
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
        return await self._socket.ask(
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
    ) -> AsyncGeneration:
        """Goes on with the session's text, after ``prompt`` if there is one."""
        return self._client.generate(
            prompt, session=self.id, idempotency_key=idempotency_key, **sampling
        )

    async def fork(self, n: int = 1, at: int | None = None) -> list[AsyncSession]:
        """``n`` copies, as the session is, or as it was when it had ``at`` tokens."""
        forked = await self._socket.ask("fork", Forked, session=self.id, n=n, at=at)
        return [AsyncSession(self._client, session) for session in forked.sessions]

    async def rewind(self, at: int) -> Rewound:
        """Cuts the text back to ``at`` tokens; the session's epoch is a new one."""
        return await self._socket.ask("rewind", Rewound, session=self.id, at=at)

    async def cancel(self) -> SessionInfo:
        """Ends what the session runs, also where nobody reads it."""
        return await self._client._call(calls.cancel_session(self.id))

    async def info(self) -> SessionInfo:
        """Position, epoch, idle seconds and bytes."""
        return await self._client._call(calls.session_info(self.id))

    async def export(self) -> bytes:
        """The session as it is now, as one signed file."""
        return await self._client._call(calls.export_session(self.id))

    async def delete(self) -> None:
        """Forgets it."""
        await self._socket.ask("delete", Deleted, session=self.id)
