"""How a request comes to its end, wherever it is, and what is left of its session then."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from server.engine.keeper import Keeper
from server.engine.lifecycle import Phase
from server.engine.live import Live
from server.engine.scheduler import Scheduler
from server.engine.sessions import SessionTable
from server.engine.types import Event, Failed, Finished, FinishReason, Top, Usage
from server.errors import RequestError


class _Reading(NamedTuple):
    """Fields of `Finished`, in its order."""

    logprobs: tuple[float, ...] | None
    logprob_sum: float | None
    tops: tuple[Top, ...] | None
    embedding: tuple[float, ...] | None


class RequestEndings:
    """Takes requests out. ``events`` and ``live`` are the engine's."""

    def __init__(
        self,
        events: list[Event],
        scheduler: Scheduler[Live],
        sessions: SessionTable,
        keeper: Keeper,
        live: dict[str, Live],
    ) -> None:
        self.cancelled: dict[Live, None] = {}
        self.num_prompt = 0
        self._events, self._scheduler = events, scheduler
        self._sessions, self._keeper, self._live = sessions, keeper, live

    def fail(self, live: Live, error: RequestError) -> None:
        """Takes the request out; what it has done is as if it had not been."""
        self._drop(live)
        self._events.extend(Failed(id, error) for id in live.request.ids)

    def finish(
        self,
        live: Live,
        reason: FinishReason | None,
        now: float,
        error: str | None = None,
        drop_held: bool = False,
        grammar_ended: bool = False,
    ) -> None:
        """Takes the request out, wherever it is, and lets its session go idle or close.

        A state that an error has touched cannot be trusted: the session leaves
        without being saved, and a store continues from what it has.
        """
        request, session = live.request, live.session
        self._drop(live)
        text, thought = _held(live, drop_held)
        if request.sampling is not None:
            session.seq += 1
        within_prompt = session.num_unfed or not live.started
        if within_prompt and not live.num_generated:  # a restored one may owe what it generated
            begun = session.position >= max(live.length, 1)
            session.cut(session.position + 1 if begun else live.length)
        if grammar_ended:
            session.constraint = None
        num_prompt = session.length - live.length - live.num_generated
        num_thought = 0 if live.turn is None else live.turn.num_thought
        usage = Usage(num_prompt, live.num_generated, live.num_cached, num_thought)
        self.num_prompt += usage.prompt_tokens
        finished = Finished(
            request.request_id,
            session.id if session.keep else None,
            session.seq,
            session.length,
            text,
            reason,
            usage,
            error,
            *_read(live, reason),
            grammar_ended=grammar_ended,
            thought=thought,
        )
        self._events.append(finished)
        for choice in request.ids[1:]:  # it ends before they began
            self._events.append(replace(finished, request_id=choice, usage=Usage(0, 0)))
        session.log_index += 1
        self._keeper.record(session, finished)
        if reason == "error":
            self._sessions.close(session)
        else:
            self._sessions.end(session, now)

    def _drop(self, live: Live) -> None:
        """The request is live no more; its session is left to the caller."""
        if not live.parked:
            self._scheduler.remove(live)
        live.move(Phase.FINISHED)
        self._sessions.drop_request(live.session)
        del self._live[live.request.request_id]
        self.cancelled.pop(live, None)


def _held(live: Live, met_stop: bool) -> tuple[str, str]:
    """What was held back of the text, and of the thinking."""
    rest = "" if live.session.keep or met_stop else live.session.detokenizer.flush()
    if live.turn is not None:
        shown = live.turn.finish(met_stop, rest)
        return shown.text, shown.thought or ""
    text = live.stop_strings.flush() if live.stop_strings and not met_stop else ""
    return text + rest, ""


def _read(live: Live, reason: FinishReason | None) -> _Reading:
    """What is known of the tokens that the request has fed, as far as it wanted that."""
    request = live.request
    logprobs = tops = embedding = None
    if live.scores is not None and request.sampling is None:
        logprobs = tuple(score.logprob for score in live.scores)
        if request.num_top:
            tops = tuple(tuple(score.top) for score in live.scores)
    if live.embedding is not None and reason is None:
        num_tokens = live.session.length - live.length
        embedding = tuple((live.embedding / num_tokens).tolist())
    return _Reading(logprobs, live.logprob_sum, tops, embedding)
