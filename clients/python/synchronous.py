"""The synchronous client: calls the asyncio client, which runs in a separate thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from .asynchronous import AsyncClient, AsyncSession
from .backoff import DEFAULT, Backoff
from .calls import Text
from .errors import ConnectionLost
from .events import Appended, Rewound
from .generation import Generation
from .protocol import Sampling
from .results import Completion, ListedSession, Score, SessionInfo, SessionText
from .thread import LoopThread


class Client:
    """A client of the server at ``url``. Use it as a context manager, or call `close`.

    Threads may share a client, but not a generation. Methods raise
    `EverstreamError` if a request or the connection fails.

    Args:
        url: the HTTP address of the server, such as ``http://127.0.0.1:8000``.
        api_key: the key that the server requires, if it has keys.
        timeout_s: the longest silence of the server, which sends events or pings, and the
            longest wait for each step of an HTTP call.
        reconnect_s: how long to retry after the connection has ended. Generations on
            kept sessions then continue after the last event. 0 disables recovery.
        backoff: the delays between the retries.

    Raises:
        ValueError: ``url`` or ``api_key`` is not valid.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        reconnect_s: float = 60.0,
        backoff: Backoff = DEFAULT,
    ) -> None:
        self._client = AsyncClient(url, api_key, timeout_s, reconnect_s, backoff)
        self._thread = LoopThread()
        self._run = self._thread.run

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
        """Closes the connections. Requests on kept sessions continue: see `resume`."""
        try:
            with contextlib.suppress(ConnectionLost):  # it was closed before
                self._run(self._client.close())
        finally:
            self._thread.stop()

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
    ) -> Generation:
        """Starts a generation; iterate over it for its tokens and its end.

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
        request = self._client._generate(
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
        generation = Generation(self._client._stream, request, self._thread)
        self._run(generation._start())
        return generation

    def resume(
        self, session: str, last_seq: int, epoch: str | None = None, take_over: bool = False
    ) -> Generation:
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
        request = self._client._resume(session, last_seq, epoch, take_over)
        generation = Generation(self._client._stream, request, self._thread)
        self._run(generation._fetch_first())
        return generation

    def create_session(self, model: str | None = None, state: str | None = None) -> Session:
        """Creates a kept session, empty or with the named state ``state``."""
        return Session(self, self._run(self._client.create_session(model, state)).id)

    def session(self, session: str) -> Session:
        """Returns an existing session by its id, without a request to the server."""
        return Session(self, session)

    def sessions(self, page_size: int = 100) -> Iterator[Session]:
        """Iterates over the caller's kept sessions in the order of their ids.

        Their ``listed`` is what the server says of them. Each request to it returns at
        most ``page_size`` of them.
        """
        for found in self._thread.iterate(self._client.sessions(page_size)):
            yield Session(self, found.id, found.listed)

    def import_session(self, data: bytes) -> Session:
        """Creates a session from a file of `Session.export`, of this or another server."""
        return Session(self, self._run(self._client.import_session(data)).id)

    def complete(
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
        return self._run(
            self._client.complete(
                prompt,
                session=session,
                keep=keep,
                state=state,
                prefix=prefix,
                return_prefix=return_prefix,
                idempotency_key=idempotency_key,
                model=model,
                **sampling,
            )
        )

    def score(
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
        return self._run(self._client.score(prompt, continuations, top=top, model=model))

    def embed(
        self, texts: Text | Sequence[Text], *, model: str | None = None
    ) -> list[tuple[float, ...]]:
        """Returns a vector of length 1 for each text."""
        return self._run(self._client.embed(texts, model=model))

    def tokenize(self, text: str, *, model: str | None = None) -> list[int]:
        """Returns the token ids of ``text``, without the start token."""
        return self._run(self._client.tokenize(text, model=model))

    def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """Returns the text of token ids."""
        return self._run(self._client.detokenize(tokens, model=model))

    def models(self) -> list[dict[str, Any]]:
        """Returns the models that are served: ``data`` of ``GET /v1/models``."""
        return self._run(self._client.models())

    def health(self) -> bool:
        """Returns whether the server is alive."""
        return self._run(self._client.health())


class Session:
    """A kept session, which uses constant memory on the server until deleted or expired.

    ``listed`` is the session as it was when `Client.sessions` listed it, else None.
    """

    def __init__(self, client: Client, session: str, listed: ListedSession | None = None) -> None:
        self.id, self.listed = session, listed
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
        """Feeds text or token ids to the session without generating.

        Args:
            text: text or token ids.
            logprobs: whether to return the log-probability of each token.
            idempotency_key: the caller's name for this work. The server reads the text
                once and answers each request with the same key.
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
        """Generates a continuation of the session's text followed by ``prompt``."""
        return self._client.generate(
            prompt, session=self.id, idempotency_key=idempotency_key, **sampling
        )

    def fork(self, n: int = 1, at: int | None = None) -> list[Session]:
        """Returns ``n`` copies of the session as it is, or as it was at ``at`` tokens."""
        return [Session(self._client, copy.id) for copy in self._run(self._session.fork(n, at))]

    @contextlib.contextmanager
    def branch(self, at: int | None = None) -> Iterator[Session]:
        """Returns a copy of the session for a block and deletes it at the end.

        The copy is the session as it is, or as it was at ``at`` tokens.
        """
        with self._client._thread.entered(self._session.branch(at)) as copy:
            yield Session(self._client, copy.id)

    def rewind(self, at: int) -> Rewound:
        """Cuts the text back to its first ``at`` tokens. The session gets a new epoch."""
        return self._run(self._session.rewind(at))

    def cancel(self) -> SessionInfo:
        """Ends the session's running request, even if another client reads it."""
        return self._run(self._session.cancel())

    def info(self) -> SessionInfo:
        """Returns the session's position, epoch, idle time and size."""
        return self._run(self._session.info())

    def text(self, start: int | None = None) -> SessionText:
        """Returns the text that the session has read and generated.

        It begins at token ``start``, by default at the oldest token in the log.
        Raises `HistoryGone` if the log begins after ``start``.
        """
        return self._run(self._session.text(start))

    def export(self) -> bytes:
        """Returns the session as it is now, as a signed file."""
        return self._run(self._session.export())

    def delete(self) -> None:
        """Deletes the session on the server."""
        self._run(self._session.delete())
