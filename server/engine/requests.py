"""The live requests of an engine: by their ids, through their phases, to their end."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from server.engine.lifecycle import Phase
from server.engine.live import Live
from server.engine.runner import Runner
from server.engine.scheduler import Scheduler
from server.engine.session import Session
from server.engine.sessions import SessionTable
from server.engine.types import Event, Failed, Finished, FinishReason, Request, Usage
from server.engine.value import Progress
from server.errors import QueueFull, RequestError

logger = logging.getLogger("everstream.engine")

OWN_ERROR = "the engine could not do this"


class RequestTable:
    """Owns the requests, those that were ``cancelled``, and the ``events`` of the next step.

    ``longest`` is how many tokens a session's text may have, None where there is no bound.
    ``num_freed_bytes`` are those of the requests that have ended.
    """

    def __init__(
        self,
        scheduler: Scheduler[Live],
        sessions: SessionTable,
        runner: Runner,
        eos_token_ids: tuple[int, ...],
        longest: int | None = None,
        max_bytes: float = math.inf,
    ) -> None:
        self.events: list[Event] = []
        self.cancelled: dict[Live, None] = {}
        self.num_prompt_tokens = self.num_preempted = self.num_freed_bytes = 0
        self._live: dict[str, Live] = {}
        self._max_bytes, self._num_bytes = max_bytes, Counter[str]()  # by owner
        self._scheduler, self._sessions = scheduler, sessions
        self._runner, self._eos_token_ids, self._longest = runner, eos_token_ids, longest

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live.values())

    def get(self, request_id: str) -> Live | None:
        return self._live.get(request_id)

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def check_room(self, request: Request) -> None:
        """Raises `QueueFull` where ``request`` has too many bytes next to those that are here.

        The only request of its owner, or of all, is never too large.
        """
        num_bytes, owned = request.num_bytes, self._num_bytes[request.owner]
        all = self._num_bytes.total()
        if owned and owned + num_bytes > self._max_bytes // 2:
            raise QueueFull("this tenant's unfinished requests are too large; try again later")
        if all and all + num_bytes > self._max_bytes:
            raise QueueFull("all unfinished requests together are too large; try again later")

    def new(self, progress: Progress, session: Session) -> Live:
        """The request of ``progress`` on ``session``, for `add`."""
        params = progress.request.sampling
        draw = None if params is None else self._runner.prepare(params)
        return Live.of(progress, session, draw, self._eos_token_ids, not self._runner.grid)

    def add(self, live: Live) -> None:
        """The request waits for its turn; one that was restored is parked."""
        self._live[live.request.request_id] = live
        self._num_bytes[live.owner] += live.num_bytes
        if self._longest is not None:
            num_before = live.session.length - live.num_generated
            live.max_tokens = min(live.max_tokens, self._longest - num_before)
        if not live.parked:
            self._scheduler.add(live)

    def rename(self, live: Live, request_id: str) -> None:
        """The request has another id from now on."""
        self._live[request_id] = self._live.pop(live.request.request_id)
        live.request = replace(live.request, request_id=request_id)

    def cancel(self, live: Live) -> None:
        """Ends the request in the next step."""
        self._sessions.stir(live.session)
        self.cancelled[live] = None

    # Phases

    def start(self, live: Live) -> None:
        """The request, the next of those that wait, runs from now on."""
        self._scheduler.start(live)
        live.move(Phase.RUNNING)
        live.num_in_turn = 0

    def preempt(self, live: Live) -> None:
        """The request waits again; its slot is free for another."""
        self.num_preempted += 1
        self._scheduler.remove(live)
        live.move(Phase.WAITING)
        self._sessions.release(live.session)
        self._scheduler.add(live)

    def park(self, live: Live) -> None:
        """Pauses the request; its slot is free for another. No effect on a parked one."""
        if live.parked:
            return
        self._scheduler.remove(live)
        live.move(Phase.PARKED)
        live.drafts, live.num_drafts = (), 0
        self._sessions.release(live.session)

    def unpark(self, live: Live) -> None:
        """Lets a parked request continue when it is its turn. No effect on another one."""
        if live.parked:
            live.move(Phase.WAITING)
            self._sessions.stir(live.session)
            self._scheduler.add(live)

    # Ends

    def fail(self, live: Live, error: RequestError) -> None:
        """Takes the request out; what it has done is as if it had not been."""
        self._drop(live)
        self.events.extend(Failed(id, error) for id in live.request.ids)

    def break_off(self, live: Live, now: float) -> None:
        """Ends a request for which the engine has raised an error; called by its handler."""
        logger.exception("a request failed", extra={"request_id": live.request.request_id})  # noqa: LOG004 - see the docstring
        if live.phase is not Phase.FINISHED:
            self.finish(live, "error", now, OWN_ERROR)

    def leave(self, session: Session) -> None:
        """The session leaves the engine, with the request that it has parked."""
        if (live := self._sessions.request_of(session)) is not None:
            assert live.parked, live
            self._forget(live)

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
        if within_prompt and not live.num_generated:  # a restored one has text of its own unfed
            begun = session.position >= max(live.length, 1)
            session.cut(session.position + 1 if begun else live.length)
        if grammar_ended:
            session.constraint = None
        num_prompt = session.length - live.length - live.num_generated
        num_thought = 0 if live.turn is None else live.turn.num_thought
        drafted = live.num_accepted, live.num_rejected
        self.num_prompt_tokens += num_prompt
        finished = Finished(
            request.request_id,
            session.id if session.keep else None,
            session.seq,
            session.length,
            text,
            reason,
            Usage(num_prompt, live.num_generated, live.num_cached, num_thought, *drafted),
            error,
            grammar_ended=grammar_ended,
            thought=thought,
            prefix=live.prefix,
            **_read(live, reason),
        )
        self.events.append(finished)
        for choice in request.ids[1:]:  # it ends before they began
            self.events.append(replace(finished, request_id=choice, usage=Usage(0, 0)))
        session.log_index += 1
        self._sessions.record(session, finished)
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
        self._forget(live)

    def _forget(self, live: Live) -> None:
        del self._live[live.request.request_id]
        self.cancelled.pop(live, None)
        self.num_freed_bytes += live.num_bytes
        self._num_bytes[live.owner] -= live.num_bytes
        if not self._num_bytes[live.owner]:
            del self._num_bytes[live.owner]


def _held(live: Live, met_stop: bool) -> tuple[str, str]:
    """What was held back of the text, and of the thinking."""
    rest = "" if live.session.keep or met_stop else live.session.detokenizer.flush()
    if live.turn is not None:
        shown = live.turn.finish(met_stop, rest)
        return shown.text, shown.thought or ""
    text = live.stop_strings.flush() if live.stop_strings and not met_stop else ""
    return text + rest, ""


def _read(live: Live, reason: FinishReason | None) -> dict[str, Any]:
    """Fields of `Finished`: what is known of the tokens fed, as far as the request wanted that."""
    request = live.request
    fields: dict[str, Any] = {"logprob_sum": live.logprob_sum}
    if live.scores is not None and request.sampling is None:
        fields["logprobs"] = tuple(score.logprob for score in live.scores)
        if request.num_top:
            fields["tops"] = tuple(tuple(score.top) for score in live.scores)
    if live.embedding is not None and reason is None:
        num_tokens = live.session.length - live.length
        fields["embedding"] = tuple((live.embedding / num_tokens).tolist())
    return fields
