"""Those who follow the logs of sessions without being their readers: woken, and given nothing.

A follower reads the log itself when it is woken, at its own pace: no events are queued for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from server.engine.value import Record


class Followers:
    """Belongs to the event loop. Once `end` was called, following is of no use any more."""

    def __init__(self) -> None:
        self.has_ended = False
        self._of: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def follow(self, session: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the log of ``session`` gets longer in this process.

        It is set at first: the log may have got longer since the caller has last read it.
        """
        changed = asyncio.Event()
        changed.set()
        self._of.setdefault(session, set()).add(changed)
        try:
            yield changed
        finally:
            self._of[session].discard(changed)
            if not self._of[session]:
                del self._of[session]

    def note(self, records: Sequence[Record]) -> None:
        """These are in the log now."""
        if self._of:
            for session in {session for session, _ in records}:
                self._wake(session)

    def end(self) -> None:
        """Wakes all, as the server is about to stop or its model to be replaced."""
        self.has_ended = True
        for session in self._of:
            self._wake(session)

    def _wake(self, session: str) -> None:
        for changed in self._of.get(session, ()):
            changed.set()
