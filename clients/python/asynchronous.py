"""The client for asyncio: many generations over one socket, side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, cast

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from clients.python.errors import ConnectionLost, EverstreamError
from clients.python.events import Appended, Created, Event, Finished, Started, Token
from clients.python.protocol import (
    Call,
    Completion,
    Protocol,
    Sampling,
    SessionInfo,
    handshake_error,
)

#: Events that one request may hold unread before the socket is no longer read.
MAX_UNREAD = 4096


class AsyncClient:
    """`clients.python.Client` with ``await``; all methods belong to one event loop."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._protocol = Protocol(url, api_key)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self._protocol.base_url, headers=self._protocol.headers, timeout=timeout_s
        )
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._waiting: dict[str, asyncio.Queue[Event | EverstreamError]] = {}

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
        await self._http.aclose()
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            self._reader.cancel()  # it may wait for a generation that nobody reads
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket = self._reader = None

    async def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGeneration:
        """Starts a generation; iterate over it for its tokens and its end."""
        request_id = await self._send(
            "generate", prompt=prompt, session=session, keep=keep, **sampling
        )
        return AsyncGeneration(self, request_id)

    async def create_session(self) -> AsyncSession:
        """A kept, empty session."""
        return AsyncSession(self, cast(Created, await self._ask("create")).session)

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
        answer = await self._call(Call("GET", "/v1/models"))
        return cast(list[dict[str, Any]], answer["data"])

    async def health(self) -> bool:
        """Whether the server is alive."""
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _call(self, call: Call) -> Any:
        try:
            response = await self._http.request(call.method, call.path, json=call.body)
        except httpx.HTTPError as error:
            raise ConnectionLost(f"no answer from {self._protocol.base_url}: {error}") from error
        return self._protocol.answer(response.status_code, response.content, response.headers)

    async def _ask(self, kind: str, **fields: object) -> Event:
        """Sends a message that has one answer, and waits for it."""
        request_id = await self._send(kind, **fields)
        try:
            return await self._next(request_id)
        finally:
            self._waiting.pop(request_id, None)

    async def _send(self, kind: str, **fields: object) -> str:
        socket = await self._connected()
        request_id, message = self._protocol.message(kind, **fields)
        self._waiting[request_id] = asyncio.Queue(MAX_UNREAD)
        try:
            await socket.send(message)
        except ConnectionClosed as error:
            raise ConnectionLost(f"the connection ended: {error}") from error
        return request_id

    async def _next(self, request_id: str) -> Event:
        try:
            async with asyncio.timeout(self._timeout_s):
                event = await self._waiting[request_id].get()
        except TimeoutError as error:
            raise ConnectionLost(f"no event within {self._timeout_s:g} s") from error
        if isinstance(event, EverstreamError):
            raise event
        return self._protocol.checked(event)

    async def _connected(self) -> ClientConnection:
        async with self._connecting:
            if self._socket is None:
                self._socket = await self._connect()
                self._reader = asyncio.create_task(self._read(self._socket))
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
        """Hands every event to the request it belongs to, until the socket ends."""
        try:
            async for frame in socket:
                event = self._protocol.event(frame)
                if event is not None and event.request_id in self._waiting:
                    await self._waiting[event.request_id].put(event)
            ended = "the connection was closed"
        except ConnectionClosed as error:
            ended = f"the connection ended: {error}"
        self._socket = None
        for events in self._waiting.values():
            with contextlib.suppress(asyncio.QueueFull):
                events.put_nowait(ConnectionLost(ended))


class AsyncGeneration:
    """The events of a running generation. Leaving its ``async with`` block early cancels it.

    Iterating gives a `Token` for each token and ends with a `Finished`, so that
    the ``text`` of all events joined is the answer.
    """

    def __init__(self, client: AsyncClient, request_id: str) -> None:
        self.request_id = request_id
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._client = client

    async def __aiter__(self) -> AsyncIterator[Token | Finished]:
        client = self._client
        while self.request_id in client._waiting:
            try:
                event = await client._next(self.request_id)
            except EverstreamError:
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cancel()

    async def cancel(self) -> Finished | None:
        """Ends it and returns its `Finished`; one that is over is left alone."""
        client = self._client
        if self.request_id in client._waiting and client._socket is not None:
            await client._socket.send(client._protocol.cancel(self.request_id))
            async for _ in self:
                pass
        return self.finished

    async def text(self) -> str:
        """All of the text, when it is there."""
        return "".join([event.text async for event in self])


class AsyncSession:
    """A kept session: constant memory on the server until it is deleted or expires."""

    def __init__(self, client: AsyncClient, session: str) -> None:
        self.id = session
        self._client = client

    async def append(self, text: str | Sequence[int]) -> Appended:
        """Lets the session read ``text``, or token ids, without generating."""
        field = "text" if isinstance(text, str) else "tokens"
        return cast(Appended, await self._client._ask("append", session=self.id, **{field: text}))

    async def generate(
        self, prompt: str | Sequence[int] = "", **sampling: Unpack[Sampling]
    ) -> AsyncGeneration:
        """Goes on with the session's text, after ``prompt`` if there is one."""
        return await self._client.generate(prompt, session=self.id, **sampling)

    async def info(self) -> SessionInfo:
        """Position, idle seconds and bytes."""
        return SessionInfo(**await self._client._call(Protocol.session(self.id)))

    async def delete(self) -> None:
        """Frees its slot."""
        await self._client._ask("delete", session=self.id)
