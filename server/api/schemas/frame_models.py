"""What the server sends on `/v1/stream`, as the AsyncAPI document describes it.

`server.api.schemas.frames` writes the bytes itself; the tests hold every frame that they
receive against these.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from server.api.schemas.responses import ErrorDetail, UsageAnswer


class Frame(BaseModel):
    """Base of all frames from the server. ``request_id`` is that of the client's message."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    request_id: str


class Created(Frame):
    """A new session."""

    type: Literal["created"]
    session: str
    epoch: str
    position: int
    state_bytes: int


class Started(Frame):
    """A ``generate`` has its session, whose last event before had ``seq``."""

    type: Literal["started"]
    session: str
    epoch: str
    seq: int
    position: int
    seed: int


class TopLogprob(BaseModel):
    """One of the most probable tokens at a position."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    token_id: int
    logprob: float


class Token(Frame):
    """One generated token. With ``top_logprobs`` in its request it has its log-probability."""

    type: Literal["token"]
    seq: int
    position: int
    token_id: int
    text: str
    logprob: float | SkipJsonSchema[None] = None
    top_logprobs: list[TopLogprob] | SkipJsonSchema[None] = None


class Finished(Frame):
    """The end of a generation; ``session`` is null where it ended with the request."""

    type: Literal["finished"]
    session: str | None
    seq: int
    position: int
    text: str
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    usage: UsageAnswer
    error: str | SkipJsonSchema[None] = None


class Appended(Frame):
    """What a session has become by an ``append``."""

    type: Literal["appended"]
    session: str | None
    position: int
    usage: UsageAnswer
    logprobs: list[float] | SkipJsonSchema[None] = None


class Deleted(Frame):
    """A session is no more."""

    type: Literal["deleted"]
    session: str


class Forked(Frame):
    """Copies of a session, each a session of its own."""

    type: Literal["forked"]
    session: str
    sessions: list[str]
    epoch: str
    position: int


class Rewound(Frame):
    """A session was cut back, and its epoch is a new one."""

    type: Literal["rewound"]
    session: str
    epoch: str
    seq: int
    position: int


class Resumed(Frame):
    """The events after ``seq`` follow, up to ``last_seq``; where ``busy``, those to come too."""

    type: Literal["resumed"]
    session: str
    epoch: str
    seq: int
    last_seq: int
    position: int
    busy: bool


class Reset(Frame):
    """The events after the cursor cannot be had; ``reason`` is for people."""

    type: Literal["reset"]
    session: str
    epoch: str
    seq: int
    last_seq: int
    position: int
    busy: bool
    reason: str


class Detached(Frame):
    """No more frames of this request come."""

    type: Literal["detached"]


class Migrate(Frame):
    """The session was saved here: a ``resume`` goes on after a restart, or elsewhere."""

    type: Literal["migrate"]
    session: str
    epoch: str
    seq: int
    position: int


class Error(BaseModel):
    """What cannot be done; ``request_id`` is null where the client gave none."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["error"]
    request_id: str | None
    status: int
    error: ErrorDetail


AnyFrame = Annotated[
    Created
    | Started
    | Token
    | Finished
    | Appended
    | Deleted
    | Forked
    | Rewound
    | Resumed
    | Reset
    | Detached
    | Migrate
    | Error,
    Field(discriminator="type"),
]
