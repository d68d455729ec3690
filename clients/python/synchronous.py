"""The client for plain code: calls onto the one for asyncio, which runs in a thread of its own."""

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
    """Talks to the server at ``url``. Use it as a context manager, or call `close`.

    ``timeout_s`` bounds the wait for each event and each HTTP answer. Where the
    connection ends, a new one is made within ``reconnect_s``, and every generation
    of a kept session continues where it was; 0 leaves that to the caller. Every
    method raises `EverstreamError` where something goes wrong. Threads may share
    a client, but not a generation.
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
        """Ends the connections. What runs in kept sessions continues for a while: see `resume`."""
        try:
            with contextlib.suppress(ConnectionLost):  # closed before
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
        idempotency_key: str | None = None,
        model: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Starts a generation; iterate over it for its tokens and its end.

        One whose ``idempotency_key`` the server has seen is read again instead. A new
        session begins with the named state ``state``.
        """
        request = self._client._generate(
            prompt,
            model=model,
            session=session,
            keep=keep,
            state=state,
            idempotency_key=idempotency_key,
            **sampling,
        )
        generation = Generation(self._client._stream, request, self._thread)
        self._run(generation._start())
        return generation

    def resume(
        self, session: str, last_seq: int, epoch: str | None = None, take_over: bool = False
    ) -> Generation:
        """The events of a session after ``last_seq``: those that were missed, then live ones.

        They are of one generation or of several, and end with what runs. Raises
        `SessionReset` where the events are gone or ``epoch`` is over, and
        `SessionAttached` where somebody else reads them, unless you ``take_over``.
        """
        request = self._client._resume(session, last_seq, epoch, take_over)
        generation = Generation(self._client._stream, request, self._thread)
        self._run(generation._fetch_first())
        return generation

    def create_session(self, model: str | None = None, state: str | None = None) -> Session:
        """A kept session, empty or with the named state ``state``."""
        return Session(self, self._run(self._client.create_session(model, state)).id)

    def session(self, session: str) -> Session:
        """A session by its id; nothing is asked of the server yet."""
        return Session(self, session)

    def sessions(self, page_size: int = 100) -> Iterator[ListedSession]:
        """All of the caller's kept sessions by id, those that sleep too."""
        return self._thread.iterate(self._client.sessions(page_size))

    def import_session(self, data: bytes) -> Session:
        """A new session from what `Session.export` gave, here or on another server."""
        return Session(self, self._run(self._client.import_session(data)).id)

    def complete(
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
        return self._run(
            self._client.complete(
                prompt,
                session=session,
                keep=keep,
                state=state,
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
        """How likely each of ``continuations`` is after ``prompt``, which is read once."""
        return self._run(self._client.score(prompt, continuations, top=top, model=model))

    def embed(
        self, texts: Text | Sequence[Text], *, model: str | None = None
    ) -> list[tuple[float, ...]]:
        """A vector of length 1 for each text."""
        return self._run(self._client.embed(texts, model=model))

    def tokenize(self, text: str, *, model: str | None = None) -> list[int]:
        """The token ids of ``text``, without the start token."""
        return self._run(self._client.tokenize(text, model=model))

    def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """The text of token ids."""
        return self._run(self._client.detokenize(tokens, model=model))

    def models(self) -> list[dict[str, Any]]:
        """The ``data`` of ``/v1/models``."""
        return self._run(self._client.models())

    def health(self) -> bool:
        """Whether the server is alive."""
        return self._run(self._client.health())


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
        """Continues with the session's text, after ``prompt`` if there is one."""
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
