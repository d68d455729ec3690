"""The client for asyncio: many generations over one socket, side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from clients.python.errors import ConnectionLost, EverstreamError, ProtocolError
from clients.python.events import Appended, Created, Deleted, Event, Finished, Token
from clients.python.inbox import Inboxes
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


class AsyncClient:
    """`clients.python.Client` with ``await``; all methods belong to one event loop."""

    _loop: asyncio.AbstractEventLoop  # known from the first connection on

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._protocol = Protocol(url, api_key)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self._protocol.base_url, headers=self._protocol.headers, timeout=timeout_s
        )
        self._socket: ClientConnection | None = None
        self._connecting = asyncio.Lock()
        self._inboxes = Inboxes()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

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
        """Ends the connections; what runs on them is cancelled by the server."""
        self._closed = True
        await self._http.aclose()
        if self._socket is not None:
            await self._socket.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGeneration:
        """A generation; iterate over it for its tokens and its end.

        It starts when it is awaited, entered with ``async with``, or first iterated.
        """
        request_id, message = self._protocol.message(
            "generate", prompt=prompt, session=session, keep=keep, **sampling
        )
        return AsyncGeneration(self, request_id, message)

    async def create_session(self) -> AsyncSession:
        """A kept, empty session."""
        return AsyncSession(self, (await self._ask("create", Created)).session)

    def session(self, session: str) -> AsyncSession:
        """A session by its id; nothing is asked of the server yet."""
        return AsyncSession(self, session)

    async def complete(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """A whole answer at once, over HTTP."""
        call = self._protocol.complete(prompt, session=session, keep=keep, **sampling)
        return self._protocol.completion(await self._call(call))

    async def models(self) -> list[dict[str, Any]]:
        """The ``data`` of ``/v1/models``."""
        return self._protocol.models(await self._call(Call("GET", "/v1/models")))

    async def health(self) -> bool:
        """Whether the server is alive."""
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _call(self, call: Call) -> Any:
        try:
            response = await self._http.request(
                call.method, call.path, content=call.body, headers=call.headers
            )
        except httpx.HTTPError as error:
            raise ConnectionLost(f"no answer from {self._protocol.base_url}: {error}") from error
        return self._protocol.answer(response.status_code, response.content, response.headers)

    async def _ask(self, kind: str, answer: type[Answer], **fields: object) -> Answer:
        """Sends a message that has one answer, and waits for it."""
        request_id, message = self._protocol.message(kind, **fields)
        arrived = asyncio.Event()
        try:
            await self._start(request_id, message, arrived)
            return self._protocol.expected(await self._next(request_id, arrived), answer)
        finally:
            self._abandon(request_id)

    async def _start(self, request_id: str, message: bytes, arrived: asyncio.Event) -> None:
        """Sends a request; ``arrived`` is set whenever `_next` may have something."""
        socket = await self._connected()
        self._inboxes.open(request_id, arrived.set)
        try:
            await socket.send(message, text=True)
        except ConnectionClosed as error:
            self._inboxes.abandon(request_id)
            raise ConnectionLost(f"the connection ended: {error}") from error

    async def _next(self, request_id: str, arrived: asyncio.Event) -> Event:
        """The next event of an open request."""
        event = self._inboxes.take(request_id)
        try:
            async with asyncio.timeout(self._timeout_s if event is None else None):
                while event is None:
                    arrived.clear()
                    await arrived.wait()
                    event = self._inboxes.take(request_id)
        except TimeoutError as error:
            self._abandon(request_id)
            raise ConnectionLost(f"no event within {self._timeout_s:g} s") from error
        return self._protocol.checked(event)

    async def _cancel(self, request_id: str) -> None:
        """Asks for an end. Where the socket has ended, its reader says so."""
        if self._socket is not None:
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(self._protocol.cancel(request_id), text=True)

    def _abandon(self, request_id: str) -> None:
        """Cancels a request that nobody reads any more, if it still runs. From any thread."""
        if self._inboxes.is_open(request_id):
            self._inboxes.abandon(request_id)
            with contextlib.suppress(RuntimeError):  # the loop is closed, so the socket is too
                self._loop.call_soon_threadsafe(self._spawn_cancels)

    def _spawn_cancels(self) -> None:
        if self._inboxes.abandoned:
            self._spawn(self._cancel_abandoned())

    async def _cancel_abandoned(self) -> None:
        while self._inboxes.abandoned:
            await self._cancel(self._inboxes.abandoned.popleft())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self) -> ClientConnection:
        async with self._connecting:
            if self._closed:
                raise ConnectionLost("the client was closed")
            if self._socket is None:
                self._loop = asyncio.get_running_loop()
                self._socket = await self._connect()
                self._spawn(self._read(self._socket))
            return self._socket

    async def _connect(self) -> ClientConnection:
        try:
            return await connect(
                self._protocol.stream_url,
                additional_headers=self._protocol.headers,
                compression=None,
                max_size=None,
                open_timeout=self._timeout_s,
            )
        except InvalidHandshake as error:
            raise handshake_error(error) from error
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"cannot reach {self._protocol.stream_url}: {error}") from error

    async def _read(self, socket: ClientConnection) -> None:
        """Delivers frames until the socket ends; it never waits for a reader of events."""
        ended: EverstreamError = ConnectionLost("the connection was closed")
        try:
            async for frame in socket:
                if (event := self._protocol.event(frame)) is not None:
                    self._inboxes.deliver(event)
                self._spawn_cancels()
        except ConnectionClosed as error:
            ended = ConnectionLost(f"the connection ended: {error}")
        except ProtocolError as error:
            ended = error
        finally:
            self._socket = None
            self._inboxes.fail(ended)
            await socket.close()


class AsyncGeneration(Progress):
    """The events of a generation, once over.

    Iterating gives a `Token` for each token and ends with a `Finished`, so that
    the ``text`` of all events joined is the answer. ``started`` is set from the
    first event on. Leaving its ``async with`` block, or dropping it, as an
    ``async for`` over it does that is left early, cancels what still runs.
    """

    def __init__(self, client: AsyncClient, request_id: str, message: bytes) -> None:
        super().__init__(request_id)
        self._client = client
        self._unsent: bytes | None = message
        self._arrived = asyncio.Event()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token | Finished:
        await self._start()
        while self._client._inboxes.is_open(self.request_id):
            event = self._note(await self._client._next(self.request_id, self._arrived))
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
        self._client._abandon(self.request_id)

    async def cancel(self) -> Finished | None:
        """Ends it and returns its `Finished`; one that is over is left alone."""
        self._unsent = None
        if self._client._inboxes.is_open(self.request_id):
            await self._client._cancel(self.request_id)
            async for _ in self:
                pass
        return self.finished

    async def text(self) -> str:
        """All of the text, when it is there."""
        return "".join([event.text async for event in self])

    async def _start(self) -> None:
        message, self._unsent = self._unsent, None
        if message is not None:
            await self._client._start(self.request_id, message, self._arrived)


class AsyncSession:
    """A kept session: constant memory on the server until it is deleted or expires."""

    def __init__(self, client: AsyncClient, session: str) -> None:
        self.id = session
        self._client = client

    async def append(self, text: str | Sequence[int]) -> Appended:
        """Lets the session read ``text``, or token ids, without generating."""
        field = "text" if isinstance(text, str) else "tokens"
        return await self._client._ask("append", Appended, session=self.id, **{field: text})

    def generate(
        self, prompt: str | Sequence[int] = "", **sampling: Unpack[Sampling]
    ) -> AsyncGeneration:
        """Goes on with the session's text, after ``prompt`` if there is one."""
        return self._client.generate(prompt, session=self.id, **sampling)

    async def info(self) -> SessionInfo:
        """Position, idle seconds and bytes."""
        return Protocol.session_info(await self._client._call(Protocol.session(self.id)))

    async def delete(self) -> None:
        """Frees its slot."""
        await self._client._ask("delete", Deleted, session=self.id)
