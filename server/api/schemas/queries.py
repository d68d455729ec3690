"""What may come in a query: text, and apart from that as strict as a body."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from server.api.schemas.names import Epoch, Label

MAX_LISTED = 1000
#: Tokens of an answer that shows a session's text.
MAX_TEXT_TOKENS = 16_384


def _digits(value: object) -> object:
    """Pydantic would take ``" 1_0.0 "`` for 10."""
    if isinstance(value, str) and not (value.isascii() and value.isdigit() and len(value) <= 16):
        raise ValueError("must be an integer in decimal digits")
    return value


def _flag(value: object) -> object:
    """Pydantic would take ``"off"`` for false."""
    if isinstance(value, str) and value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]
Limit = Annotated[int, Field(ge=1, le=MAX_LISTED), BeforeValidator(_digits)]
TextTokens = Annotated[int, Field(ge=1, le=MAX_TEXT_TOKENS), BeforeValidator(_digits)]
Seq = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(_digits)]


class Query(BaseModel):
    """Base of all queries."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ListQuery(Query):
    """`GET /v1/sessions`: at most ``limit`` sessions, those after the one called ``after``."""

    after: Label | SkipJsonSchema[None] = None
    limit: Limit = 100


class TextQuery(Query):
    """`GET /v1/sessions/{id}/text`: at most ``max_tokens`` tokens from number ``start`` on."""

    start: Seq | SkipJsonSchema[None] = None
    max_tokens: TextTokens = MAX_TEXT_TOKENS


class EventsQuery(Query):
    """`GET /v1/sessions/{id}/events`: those after ``starting_after`` of ``epoch``."""

    starting_after: Seq | SkipJsonSchema[None] = None
    epoch: Epoch | SkipJsonSchema[None] = None
    take_over: Flag = False


class StreamQuery(Query):
    """`GET /v1/sessions/{id}/stream`: the parameters of the Durable Streams protocol, and two more.

    The protocol wants those that are unknown to be ignored. With ``turn``, an offset, there is
    only what the session generates next from there on.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    offset: Label | SkipJsonSchema[None] = None
    live: Literal["long-poll", "sse"] | SkipJsonSchema[None] = None
    cursor: Seq | SkipJsonSchema[None] = None
    format: Literal["events", "text", "ai-sdk", "ag-ui"] = "events"
    turn: Label | SkipJsonSchema[None] = None
