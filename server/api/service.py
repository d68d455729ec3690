"""What every route needs, put together once by `server.api.app.create_app`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.api.model_info import ModelInfo
from server.api.porter import Porter
from server.api.translate import Translator
from server.driver import Driver
from server.sessions import Sessions

if TYPE_CHECKING:
    from server.api.websocket import Stream


@dataclass(frozen=True, slots=True)
class Service:
    """The parts behind the routes. ``streams`` are the open sockets, for the drain."""

    driver: Driver
    sessions: Sessions
    porter: Porter
    translator: Translator
    model: ModelInfo
    outbox_events: int
    max_socket_requests: int
    streams: set[Stream] = field(default_factory=set)

    async def close_streams(self, timeout_s: float) -> None:
        """Ends every socket with 1012 after what its outbox holds, or gives up on it."""
        streams = list(self.streams)
        for stream in streams:
            stream.close(1012, "the server is draining")
        if streams:
            await asyncio.wait([stream.ended for stream in streams], timeout=timeout_s)
