"""A message to the server, and what may become of it when its connection is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .errors import ConnectionLost, EverstreamError
from .message import encode


class EndMessage(NamedTuple):
    """The message by which a reader ends its request (``cancel``) or leaves it (``detach``)."""

    kind: Literal["cancel", "detach"]
    request_id: str


class Cursor(NamedTuple):
    """What has arrived of a session's events: all up to ``seq`` of ``epoch``."""

    session: str
    epoch: str
    seq: int


@dataclass(frozen=True, slots=True)
class Request:
    """``is_kept``: its events are in a log, so that they can be read on.

    ``is_repeatable``: the server does it once, however often it is sent.
    """

    request_id: str
    kind: str
    message: bytes
    is_kept: bool = False
    is_repeatable: bool = False

    @property
    def follows(self) -> bool:
        """Whether events of more than one generation may come, and all are wanted."""
        return self.kind == "resume"

    def resumed_at(self, cursor: Cursor) -> bytes:
        """The message that continues after ``cursor``, under the same name."""
        return encode(
            {
                "type": "resume",
                "request_id": self.request_id,
                "session": cursor.session,
                "epoch": cursor.epoch,
                "last_seq": cursor.seq,
            }
        )

    def lost(self, error: EverstreamError, has_begun: bool) -> EverstreamError:
        """What to say where ``error`` took the connection and nothing brings the request back."""
        if not isinstance(error, ConnectionLost) or self.kind == "resume":
            return error
        if has_begun and self.kind == "generate":
            read_on = "; it can be read on" if self.is_kept else "; what is not kept is over"
            return ConnectionLost(f"{error}{read_on}")
        if self.is_kept or self.kind != "generate":
            return ConnectionLost(f"{error}; whether the {self.kind} was done is not known")
        return error
