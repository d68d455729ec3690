"""The process that takes over from an owner stopped past its lease: for both proofs 10."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from websockets.asyncio.client import ClientConnection

from tests.reliability.history import History, Log
from tests.reliability.soloist import Soloist
from tests.reliability.streams import SAMPLING, KeptStream, answer, ask, place_of, socket_of

TRIES_S = 120.0


class Heir:
    """Another client, which resumes a stream's session at the server that takes over."""

    def __init__(self, stream: KeptStream, history: History) -> None:
        self.stream = stream
        self.taken_over_at = 0
        self._reader = history.reader(f"heir of {stream.name}", stream.session)

    async def read(self, url: str, num_events: int) -> None:
        """Everything from the first event on, until there are so many new ones."""
        async with asyncio.timeout(TRIES_S):
            while True:
                if await self._try(url, num_events):
                    return
                await asyncio.sleep(0.1)

    async def _try(self, url: str, num_events: int) -> bool:
        stream = self.stream
        async with socket_of(url) as socket:
            await ask(socket, type="resume", request_id="r", **place_of(stream))
            resumed = await answer(socket)
            if resumed["type"] == "error":  # the lease is not over yet
                assert resumed["error"]["code"] == "session_elsewhere", resumed
                return False
            assert resumed["type"] == "resumed", resumed
            self.taken_over_at = resumed["last_seq"]
            self._reader.attach(resumed["epoch"], 0, "second")
            while self._reader.last_seq < self.taken_over_at + num_events:
                self._reader.saw_frame(await answer(socket))
            return True


async def endless(socket: ClientConnection) -> None:
    """Has ``socket`` read something that is not kept."""
    body = {"prompt": "hi", "max_tokens": 10**6, **SAMPLING}
    await ask(socket, type="generate", request_id="b", **body)
    assert (await answer(socket))["type"] == "started"


def check_inheritance(heirs: Sequence[Heir], history: History, log: Log, model: Path) -> None:
    """The first owner's readers heard nothing after the second took over, and all is one text."""
    for heir in heirs:
        stream = heir.stream
        assert stream.ends == ["broken"] or stream.frames[-1]["error"]["code"] == "store_taken"
        (epoch,) = {epoch for session, epoch in log if session == stream.session}
        history.owned(stream.session, "first", epoch, 0)
        history.owned(stream.session, "second", epoch, heir.taken_over_at)
    history.check(log, complete=False)
    soloist = Soloist(model)
    for (session, _), events in log.items():
        (body,) = [heir.stream.body for heir in heirs if heir.stream.session == session]
        logged = [event.token_id for event in events if event.token_id is not None]
        assert logged == soloist.tokens(**{**body, "max_tokens": len(logged)})
