"""A message to the server, and how it can be recovered when its connection is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .errors import ConnectionLost, EverstreamError
from .message import encode


class EndMessage(NamedTuple):
    """The message that ends a request (``cancel``) or stops reading it (``detach``)."""

    kind: Literal["cancel", "detach"]
    request_id: str


class Cursor(NamedTuple):
    """The last event of a session that has arrived: ``seq`` in ``epoch``."""

    session: str
    epoch: str
    seq: int


@dataclass(frozen=True, slots=True)
class Request:
    """A message and how it can be recovered.

    ``is_kept``: its events are in a log, so it can be resumed.
    ``is_repeatable``: the server executes it once, however often it is sent.
    """

    request_id: str
    kind: str
    message: bytes
    is_kept: bool = False
    is_repeatable: bool = False

    @property
    def follows(self) -> bool:
        """Whether it reads the events of all generations, not only of one."""
        return self.kind == "resume"

    def resumed_at(self, cursor: Cursor) -> bytes:
        """Returns the message that continues after ``cursor``, with the same request id."""
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
        """Returns the error of a request that ``error`` interrupted and that is not recovered."""
        if not isinstance(error, ConnectionLost) or self.kind == "resume":
            return error
        if has_begun and self.kind == "generate":
            read_on = "; it can be read on" if self.is_kept else "; what is not kept is over"
            return ConnectionLost(f"{error}{read_on}")
        if self.is_kept or self.kind != "generate":
            return ConnectionLost(f"{error}; whether the {self.kind} was done is not known")
        return error
