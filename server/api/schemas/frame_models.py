"""What the server sends on `/v1/stream`, described once.

`server.api.frames` makes frames of these types, mypy checks them field by field,
the AsyncAPI document shows them, and the tests validate every frame that they receive by
them. A token's frame alone is put together from bytes, and a test compares the two.
In the document their names do without "Frame".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from server.api.schemas.responses import ErrorDetail, Forked, SessionCreated, UsageAnswer

STRICT = ConfigDict(strict=True, extra="forbid")


@with_config(STRICT)
class Frame(TypedDict):
    """Base of all frames from the server. ``request_id`` is that of the client's message."""

    request_id: str


class SessionFrame(Frame):
    """Base of frames that name a session's last event and its position."""

    session: str
    epoch: str
    seq: int
    position: int


class CreatedFrame(Frame, SessionCreated):
    """A new session."""

    type: Literal["created"]


class StartedFrame(SessionFrame):
    """A ``generate`` has its session, whose last event before had ``seq``."""

    type: Literal["started"]
    seed: int


@with_config(STRICT)
class TopLogprob(TypedDict):
    """One of the most probable tokens at a position."""

    token_id: int
    logprob: float


class TokenFrame(Frame):
    """One generated token. With ``top_logprobs`` in its request it has its log-probability."""

    type: Literal["token"]
    seq: int
    position: int
    token_id: int
    text: str
    logprob: NotRequired[float]
    top_logprobs: NotRequired[list[TopLogprob]]


class FinishedFrame(Frame):
    """The end of a generation; ``session`` is null where it ended with the request.

    ``prefix`` is there where the request had ``return_prefix`` and the prompt's state is kept.
    """

    type: Literal["finished"]
    session: str | None
    seq: int
    position: int
    text: str
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    usage: UsageAnswer
    prefix: NotRequired[str]
    error: NotRequired[str]


class AppendedFrame(Frame):
    """What a session has become by an ``append``."""

    type: Literal["appended"]
    session: str | None
    position: int
    usage: UsageAnswer
    logprobs: NotRequired[Sequence[float]]


class DeletedFrame(Frame):
    """A session was deleted."""

    type: Literal["deleted"]
    session: str


class ForkedFrame(Frame, Forked):
    """Copies of a session, each a session of its own."""

    type: Literal["forked"]


class RewoundFrame(SessionFrame):
    """A session was cut back, and its epoch is a new one."""

    type: Literal["rewound"]


class ResumedFrame(SessionFrame):
    """The events after ``seq`` follow, up to ``last_seq``; where ``busy``, those to come too."""

    type: Literal["resumed"]
    last_seq: int
    busy: bool


class ResetFrame(SessionFrame):
    """The events after the cursor are not available; ``reason`` is for people."""

    type: Literal["reset"]
    last_seq: int
    busy: bool
    reason: str


class DetachedFrame(Frame):
    """No more frames of this request come."""

    type: Literal["detached"]


class MigrateFrame(SessionFrame):
    """The session was saved here: a ``resume`` continues after a restart, or elsewhere."""

    type: Literal["migrate"]


@with_config(STRICT)
class ErrorFrame(TypedDict):
    """What cannot be done; ``request_id`` is null where the client gave none."""

    type: Literal["error"]
    request_id: str | None
    status: int
    error: ErrorDetail


AnyFrame = Annotated[
    CreatedFrame
    | StartedFrame
    | TokenFrame
    | FinishedFrame
    | AppendedFrame
    | DeletedFrame
    | ForkedFrame
    | RewoundFrame
    | ResumedFrame
    | ResetFrame
    | DetachedFrame
    | MigrateFrame
    | ErrorFrame,
    Field(discriminator="type"),
]
