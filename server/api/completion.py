"""What every answer made of a request's events shares: its end, its usage, its last line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import orjson

from server.api.errors import SessionMigrated
from server.api.schemas.responses import (
    CompletionDetails,
    PromptDetails,
    PromptUsage,
    UsageAnswer,
)
from server.api.streaming import server_sent
from server.engine.types import Event, Failed, Finished, Usage
from server.errors import InternalFailure

DONE = b"data: [DONE]\n\n"


class LastEventsWriter:
    """Writes JSON of the last event of each request, by its id."""

    def __init__(self, write: Callable[[Mapping[str, Event]], Iterator[bytes]]) -> None:
        self._write = write
        self._lasts: dict[str, Event] = {}

    def add(self, event: Event) -> None:
        self._lasts[event.request_id] = event

    def whole(self) -> Iterator[bytes]:
        return self._write(self._lasts)


def appended_body(ends: Mapping[str, Event]) -> Iterator[bytes]:
    """The JSON answer to an append."""
    (event,) = ends.values()
    last = ended(event)
    if last.finish_reason == "cancelled":
        raise InternalFailure("the session was deleted meanwhile")
    body = {"session": last.session, "position": last.position, "usage": usage_object(last.usage)}
    scored = {} if last.logprobs is None else {"logprobs": last.logprobs}
    yield orjson.dumps(body | scored)


def ended(last: Event) -> Finished:
    """The `Finished` of a request; raises the `RequestError` that it ended by instead."""
    if isinstance(last, Failed):
        raise last.error
    if not isinstance(last, Finished):
        raise SessionMigrated
    if last.finish_reason == "error":
        raise InternalFailure(last.error or "the request failed")
    return last


def sse(value: object) -> bytes:
    """One server-sent event."""
    return server_sent(orjson.dumps(value))


def total_usage(ends: Sequence[Finished]) -> Usage:
    """That of all choices."""
    return Usage(
        sum(end.usage.prompt_tokens for end in ends),
        sum(end.usage.completion_tokens for end in ends),
        sum(end.usage.cached_tokens for end in ends),
        sum(end.usage.reasoning_tokens for end in ends),
        sum(end.usage.accepted_tokens for end in ends),
        sum(end.usage.rejected_tokens for end in ends),
    )


def whole_usage(usage: Usage) -> PromptUsage:
    """OpenAI's ``usage`` at the end of an answer: what the prefix cache had is known then."""
    details: PromptDetails = {"cached_tokens": usage.cached_tokens}
    return {**usage_object(usage), "prompt_tokens_details": details}


def usage_object(usage: Usage) -> UsageAnswer:
    """OpenAI's ``usage``, with what was drafted where anything was."""
    answer: UsageAnswer = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.accepted_tokens or usage.rejected_tokens:
        answer["completion_tokens_details"] = drafted(usage)
    return answer


def drafted(usage: Usage) -> CompletionDetails:
    """How many of the tokens that were drafted were right, and how many were not."""
    return {
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }
