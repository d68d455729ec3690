"""The client for asyncio: many generations over one socket, side by side."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from . import calls
from .backoff import DEFAULT, Backoff
from .calls import Call, Text
from .errors import ConnectionLost, EverstreamError
from .events import Appended, Created, Deleted, Forked, Rewound
from .generation import AsyncGeneration
from .protocol import Protocol, Sampling
from .request import Request
from .results import Completion, ListedSession, Score, SessionInfo, SessionText
from .stream import Stream

T = TypeVar("T")


class AsyncClient:
    """`Client` with ``await``; all methods belong to one event loop."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        reconnect_s: float = 60.0,
        backoff: Backoff = DEFAULT,
    ) -> None:
        self._protocol = Protocol(url, api_key)
        self._stream = Stream(self._protocol, timeout_s, reconnect_s, backoff)
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
        """Ends the connections. What runs in kept sessions continues for a while: see `resume`."""
        try:
            await self._stream.close()
        finally:
            await self._http.aclose()

    def generate(
        self,
        prompt: Text = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        state: str | None = None,
        idempotency_key: str | None = None,
        model: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGeneration:
        """A generation; iterate over it for its tokens and its end.

        It starts when it is awaited, entered with ``async with``, or first
        iterated. One whose ``idempotency_key`` the server has seen is read again
        instead. A new session begins with the named state ``state``.
        """
        request = self._generate(
            prompt,
            model=model,
            session=session,
            keep=keep,
            state=state,
            idempotency_key=idempotency_key,
            **sampling,
        )
        return AsyncGeneration(self._stream, request)

    async def resume(
        self, session: str, last_seq: int, epoch: str | None = None, take_over: bool = False
    ) -> AsyncGeneration:
        """The events of a session after ``last_seq``: those that were missed, then live ones.

        They are of one generation or of several, and end with what runs. Raises
        `SessionReset` where the events are gone or ``epoch`` is over, and
        `SessionAttached` where somebody else reads them, unless you ``take_over``.
        """
        generation = AsyncGeneration(
            self._stream, self._resume(session, last_seq, epoch, take_over)
        )
        await generation._fetch_first()
        return generation

    async def create_session(
        self, model: str | None = None, state: str | None = None
    ) -> AsyncSession:
        """A kept session, empty or with the named state ``state``."""
        created = await self._stream.ask("create", Created, model=model, state=state)
        return AsyncSession(self, created.session)

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
        prompt: Text = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        state: str | None = None,
        idempotency_key: str | None = None,
        model: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """A whole answer at once, over HTTP."""
        return await self._call(
            calls.complete(
                prompt,
                model=model,
                session=session,
                keep=keep,
                state=state,
                idempotency_key=idempotency_key,
                **sampling,
            )
        )

    async def score(
        self,
        prompt: Text,
        continuations: Sequence[Text],
        *,
        top: int | None = None,
        model: str | None = None,
    ) -> list[Score]:
        """How likely each of ``continuations`` is after ``prompt``, which is read once."""
        return await self._call(calls.score(prompt, continuations, model, top))

    async def embed(
        self, texts: Text | Sequence[Text], *, model: str | None = None
    ) -> list[tuple[float, ...]]:
        """A vector of length 1 for each text."""
        return await self._call(calls.embed(texts, model))

    async def tokenize(self, text: str, *, model: str | None = None) -> list[int]:
        """The token ids of ``text``, without the start token."""
        return await self._call(calls.tokenize(text, model))

    async def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """The text of token ids."""
        return await self._call(calls.detokenize(tokens, model))

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

    def _generate(self, prompt: Text, **fields: object) -> Request:
        return self._protocol.request("generate", prompt=prompt, **fields)

    def _resume(self, session: str, last_seq: int, epoch: str | None, take_over: bool) -> Request:
        return self._protocol.request(
            "resume",
            session=session,
            last_seq=last_seq,
            epoch=epoch,
            take_over=take_over,
        )


class AsyncSession:
    """`Session` for asyncio."""

    def __init__(self, client: AsyncClient, session: str) -> None:
        self.id = session
        self._client = client
        self._stream = client._stream

    async def append(
        self,
        text: str | Sequence[int],
        *,
        logprobs: bool = False,
        idempotency_key: str | None = None,
    ) -> Appended:
        """Lets the session read ``text``, or token ids, without generating."""
        return await self._stream.ask(
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
        """Continues with the session's text, after ``prompt`` if there is one."""
        return self._client.generate(
            prompt, session=self.id, idempotency_key=idempotency_key, **sampling
        )

    async def fork(self, n: int = 1, at: int | None = None) -> list[AsyncSession]:
        """``n`` copies, as the session is, or as it was when it had ``at`` tokens."""
        forked = await self._stream.ask("fork", Forked, session=self.id, n=n, at=at)
        return [AsyncSession(self._client, session) for session in forked.sessions]

    @contextlib.asynccontextmanager
    async def branch(self, at: int | None = None) -> AsyncIterator[AsyncSession]:
        """A copy for the length of an ``async with`` block; it is deleted at the end."""
        (copy,) = await self.fork(at=at)
        try:
            yield copy
        except BaseException:
            with contextlib.suppress(EverstreamError):
                await copy.delete()
            raise
        await copy.delete()

    async def rewind(self, at: int) -> Rewound:
        """Cuts the text back to ``at`` tokens; the session's epoch is a new one."""
        return await self._stream.ask("rewind", Rewound, session=self.id, at=at)

    async def cancel(self) -> SessionInfo:
        """Ends what the session runs, also where it has no reader."""
        return await self._client._call(calls.cancel_session(self.id))

    async def info(self) -> SessionInfo:
        """Position, epoch, idle seconds and bytes."""
        return await self._client._call(calls.session_info(self.id))

    async def text(self, start: int | None = None) -> SessionText:
        """What it has read and generated, from token ``start`` or the oldest that is kept."""
        page = await self._client._call(calls.session_text(self.id, start))
        parts, position = [*page.parts], page.position  # what it runs may add to it without an end
        while page.parts and page.end < position:
            page = await self._client._call(calls.session_text(self.id, page.end))
            parts += page.parts
        begin = parts[0].start if parts else page.start
        return SessionText(begin, page.end, page.position, parts)

    async def export(self) -> bytes:
        """The session as it is now, as one signed file."""
        return await self._client._call(calls.export_session(self.id))

    async def delete(self) -> None:
        """Forgets it."""
        await self._stream.ask("delete", Deleted, session=self.id)
