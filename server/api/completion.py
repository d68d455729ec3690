"""What every answer made of a request's events shares: its end, its usage, its last line."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from server.api.errors import SessionMigrated
from server.api.translate import usage_object
from server.engine.errors import InternalFailure
from server.engine.types import Event, Failed, Finished, Usage

DONE = b"data: [DONE]\n\n"


def appended_body(events: list[Event]) -> bytes:
    """The JSON answer to an append; raises the `EngineError` that it ended by."""
    last = ended(events)
    if last.finish_reason == "cancelled":
        raise InternalFailure("the session was deleted meanwhile")
    body = {"session": last.session, "position": last.position, "usage": usage_object(last.usage)}
    scored = {} if last.logprobs is None else {"logprobs": last.logprobs}
    return orjson.dumps(body | scored)


def ended(events: Sequence[Event]) -> Finished:
    """The end of a request; raises the `EngineError` where it is none to show."""
    last = events[-1]
    if isinstance(last, Failed):
        raise last.error
    if not isinstance(last, Finished):
        raise SessionMigrated
    if last.finish_reason == "error":
        raise InternalFailure(last.error or "the request failed")
    return last


def sse(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def total_usage(ends: Sequence[Finished]) -> Usage:
    """That of all choices."""
    return Usage(
        sum(end.usage.prompt_tokens for end in ends),
        sum(end.usage.completion_tokens for end in ends),
    )
