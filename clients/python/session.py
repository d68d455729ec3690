"""Kept sessions: constant memory on the server until they are deleted or expire."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

from . import calls
from .errors import EverstreamError
from .events import Appended, Deleted, Forked, Rewound
from .generation import AsyncGeneration, Generation
from .protocol import Protocol, Sampling
from .results import SessionInfo, SessionText

if TYPE_CHECKING:
    from .asynchronous import AsyncClient
    from .synchronous import Client


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
        """Goes on with the session's text, after ``prompt`` if there is one."""
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


class Session:
    """A kept session: constant memory on the server until it is deleted or expires."""

    def __init__(self, client: Client, session: str) -> None:
        self.id = session
        self._client = client
        self._run = client._thread.run
        self._session = AsyncSession(client._client, session)

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
        return self._run(
            self._session.append(text, logprobs=logprobs, idempotency_key=idempotency_key)
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
        return [Session(self._client, copy.id) for copy in self._run(self._session.fork(n, at))]

    @contextlib.contextmanager
    def branch(self, at: int | None = None) -> Iterator[Session]:
        """A copy for the length of a ``with`` block; it is deleted at the end.

        It is as the session is, or as it was when it had ``at`` tokens.
        """
        with self._client._thread.entered(self._session.branch(at)) as copy:
            yield Session(self._client, copy.id)

    def rewind(self, at: int) -> Rewound:
        """Cuts the text back to ``at`` tokens; the session's epoch is a new one."""
        return self._run(self._session.rewind(at))

    def cancel(self) -> SessionInfo:
        """Ends what the session runs, also where it has no reader."""
        return self._run(self._session.cancel())

    def info(self) -> SessionInfo:
        """Position, epoch, idle seconds and bytes."""
        return self._run(self._session.info())

    def text(self, start: int | None = None) -> SessionText:
        """What it has read and generated, from token ``start`` or the oldest that is kept.

        Raises `HistoryGone` for a ``start`` before that.
        """
        return self._run(self._session.text(start))

    def export(self) -> bytes:
        """The session as it is now, as one signed file."""
        return self._run(self._session.export())

    def delete(self) -> None:
        """Forgets it."""
        self._run(self._session.delete())
