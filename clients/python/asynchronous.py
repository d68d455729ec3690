"""The asyncio client: many concurrent generations over one WebSocket."""

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
    """`Client` for asyncio. Call all methods from one event loop."""

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
        """Closes the connections. Requests on kept sessions continue: see `resume`."""
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
        prefix: str | None = None,
        return_prefix: bool | None = None,
        idempotency_key: str | None = None,
        model: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGeneration:
        """Returns a generation; iterate over it for its tokens and its end.

        The generation starts when it is awaited, entered with ``async with``, or
        first iterated.

        Args:
            prompt: text or token ids.
            session: the kept session to continue; by default a new session.
            keep: whether to keep the new session.
            state: the named state that a new session begins with.
            prefix: the handle of a prompt that the server has read, which ``prompt`` continues.
                Raises `PrefixNotFound` where the server has it no more.
            return_prefix: whether ``prefix`` of the end is to be the handle of this prompt.
            idempotency_key: the caller's name for this work, for a kept session. If
                the server knows it, the events of the first request are returned.
            model: one of several models; by default the session's or the first.
            sampling: the options of `Sampling`.
        """
        request = self._generate(
            prompt,
            model=model,
            session=session,
            keep=keep,
            state=state,
            prefix=prefix,
            return_prefix=return_prefix,
            idempotency_key=idempotency_key,
            **sampling,
        )
        return AsyncGeneration(self._stream, request)

    async def resume(
        self, session: str, last_seq: int, epoch: str | None = None, take_over: bool = False
    ) -> AsyncGeneration:
        """Returns the events of a session after ``last_seq``: missed events, then live ones.

        The events may belong to several generations. They end with the running
        request, or with the last event if the session is idle.

        Args:
            session: the id of a kept session.
            last_seq: the ``seq`` of the last event that was read; 0 for all events.
            epoch: the epoch of ``last_seq``; by default the present one.
            take_over: whether to replace another reader of the session.

        Raises:
            SessionReset: the events are not available, or ``epoch`` is an earlier one.
            SessionAttached: another client reads the session.
        """
        generation = AsyncGeneration(
            self._stream, self._resume(session, last_seq, epoch, take_over)
        )
        await generation._fetch_first()
        return generation

    async def create_session(
        self, model: str | None = None, state: str | None = None
    ) -> AsyncSession:
        """Creates a kept session, empty or with the named state ``state``."""
        created = await self._stream.ask("create", Created, model=model, state=state)
        return AsyncSession(self, created.session)

    def session(self, session: str) -> AsyncSession:
        """Returns an existing session by its id, without a request to the server."""
        return AsyncSession(self, session)

    async def sessions(self, page_size: int = 100) -> AsyncIterator[AsyncSession]:
        """Iterates over the caller's kept sessions in the order of their ids.

        Their ``listed`` is what the server says of them. Each request to it returns at
        most ``page_size`` of them.
        """
        after: str | None = None
        while True:
            page = await self._call(calls.sessions(after, page_size))
            for listed in page.sessions:
                yield AsyncSession(self, listed.session, listed)
            if (after := page.after) is None:
                return

    async def import_session(self, data: bytes) -> AsyncSession:
        """Creates a session from a file of `AsyncSession.export`, of this or another server."""
        return AsyncSession(self, await self._call(calls.import_session(data)))

    async def complete(
        self,
        prompt: Text = "",
        *,
        session: str | None = None,
        keep: bool | None = None,
        state: str | None = None,
        prefix: str | None = None,
        return_prefix: bool | None = None,
        idempotency_key: str | None = None,
        model: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """Returns a whole answer over HTTP; the arguments are those of `generate`."""
        return await self._call(
            calls.complete(
                prompt,
                model=model,
                session=session,
                keep=keep,
                state=state,
                prefix=prefix,
                return_prefix=return_prefix,
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
        """Returns how likely each of ``continuations`` is after ``prompt``.

        The server reads ``prompt`` once. With ``top`` the scores also contain the
        ``top`` most probable tokens at each place.
        """
        return await self._call(calls.score(prompt, continuations, model, top))

    async def embed(
        self, texts: Text | Sequence[Text], *, model: str | None = None
    ) -> list[tuple[float, ...]]:
        """Returns a vector of length 1 for each text."""
        return await self._call(calls.embed(texts, model))

    async def tokenize(self, text: str, *, model: str | None = None) -> list[int]:
        """Returns the token ids of ``text``, without the start token."""
        return await self._call(calls.tokenize(text, model))

    async def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """Returns the text of token ids."""
        return await self._call(calls.detokenize(tokens, model))

    async def models(self) -> list[dict[str, Any]]:
        """Returns the models that are served: ``data`` of ``GET /v1/models``."""
        return await self._call(calls.models())

    async def health(self) -> bool:
        """Returns whether the server is alive."""
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

    def __init__(
        self, client: AsyncClient, session: str, listed: ListedSession | None = None
    ) -> None:
        self.id, self.listed = session, listed
        self._client = client
        self._stream = client._stream

    async def append(
        self,
        text: str | Sequence[int],
        *,
        logprobs: bool = False,
        idempotency_key: str | None = None,
    ) -> Appended:
        """Feeds text or token ids to the session without generating.

        Args:
            text: text or token ids.
            logprobs: whether to return the log-probability of each token.
            idempotency_key: the caller's name for this work. The server reads the text
                once and answers each request with the same key.
        """
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
        """Generates a continuation of the session's text followed by ``prompt``."""
        return self._client.generate(
            prompt, session=self.id, idempotency_key=idempotency_key, **sampling
        )

    async def fork(self, n: int = 1, at: int | None = None) -> list[AsyncSession]:
        """Returns ``n`` copies of the session as it is, or as it was at ``at`` tokens."""
        forked = await self._stream.ask("fork", Forked, session=self.id, n=n, at=at)
        return [AsyncSession(self._client, session) for session in forked.sessions]

    @contextlib.asynccontextmanager
    async def branch(self, at: int | None = None) -> AsyncIterator[AsyncSession]:
        """Returns a copy of the session for a block and deletes it at the end.

        The copy is the session as it is, or as it was at ``at`` tokens.
        """
        (copy,) = await self.fork(at=at)
        try:
            yield copy
        except BaseException:
            with contextlib.suppress(EverstreamError):
                await copy.delete()
            raise
        await copy.delete()

    async def rewind(self, at: int) -> Rewound:
        """Cuts the text back to its first ``at`` tokens. The session gets a new epoch."""
        return await self._stream.ask("rewind", Rewound, session=self.id, at=at)

    async def cancel(self) -> SessionInfo:
        """Ends the session's running request, even if another client reads it."""
        return await self._client._call(calls.cancel_session(self.id))

    async def info(self) -> SessionInfo:
        """Returns the session's position, epoch, idle time and size."""
        return await self._client._call(calls.session_info(self.id))

    async def text(self, start: int | None = None) -> SessionText:
        """Returns the text that the session has read and generated.

        It begins at token ``start``, by default at the oldest token in the log.
        Raises `HistoryGone` if the log begins after ``start``.
        """
        page = await self._client._call(calls.session_text(self.id, start))
        # Stop at this position: a running request may extend the text without an end.
        parts, position = [*page.parts], page.position
        while page.parts and page.end < position:
            page = await self._client._call(calls.session_text(self.id, page.end))
            parts += page.parts
        begin = parts[0].start if parts else page.start
        return SessionText(begin, page.end, page.position, parts)

    async def export(self) -> bytes:
        """Returns the session as it is now, as a signed file."""
        return await self._client._call(calls.export_session(self.id))

    async def delete(self) -> None:
        """Deletes the session on the server."""
        await self._stream.ask("delete", Deleted, session=self.id)
