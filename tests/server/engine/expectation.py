"""What clients may expect of sessions: texts, and requests that lengthen them.

The oracle of the engine's tests with random commands. It knows the whole of every
text, so what comes next is worked out from the beginning, without a state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from model.tokenizer import Tokenizer
from server.engine.text import StopStrings
from server.engine.types import (
    Event,
    Failed,
    Finished,
    Migrated,
    Request,
    Scored,
    Started,
    TokenEvent,
    Usage,
)
from server.errors import CapacityExhausted, RequestError, SessionAttached
from tests.server.engine.texts import Text


@dataclass
class Work:
    """A request that has not finished. ``length`` is that of the text before it."""

    request: Request
    text: Text
    length: int
    num_generated: int = 0
    started: bool = False
    cancelled: bool = False
    has_reader: bool = True
    scored: bool = False
    restored: bool = False
    grammar_ended: bool = False
    first_scored: int | None = None
    stops: StopStrings = field(default_factory=lambda: StopStrings(()))


class Expectation:
    """``texts`` by the sessions' ids, those that are not kept while they run; ``works`` by name."""

    def __init__(self, tokenizer: Tokenizer, bos: int) -> None:
        self.texts: dict[str, Text] = {}
        self.works: dict[str, Work] = {}
        self.lost: dict[
            str, type[RequestError]
        ] = {}  # what readers must hear that have lost theirs
        self._tokenizer, self._bos = tokenizer, bos

    def submit(self, request: Request) -> None:
        """``request`` was accepted."""
        if request.session is None:
            text = Text(self._tokenizer, request.owner, request.keep)
        else:
            text = self.texts[request.session]
            assert text.running is None
        work = Work(request, text, len(text.tokens))
        start = [self._bos] if not text.tokens and (request.start or not request.tokens) else []
        text.begin(request, [*start, *request.tokens])
        if request.sampling is not None:
            work.stops = StopStrings(request.sampling.stop)
        text.running = request.request_id
        self.works[request.request_id] = work
        for index, id in enumerate(request.ids[1:], 1):
            copy = text.copy(len(text.tokens), keep=False)
            choice = replace(request, request_id=id, score=bool(request.continuations))
            if request.sampling is not None:
                params = replace(request.sampling, seed=request.sampling.seed + index)
                choice = replace(choice, sampling=params)
            else:
                copy.prompt(request.continuations[index])
            self.works[id] = Work(choice, copy, len(text.tokens))
        if request.continuations:
            work.first_scored = len(text.tokens)
            work.request = replace(request, score=True)
            text.prompt(request.continuations[0])

    def attach(self, text: Text, name: str) -> None:
        """What runs on ``text``, if anything, has a new reader and name."""
        if text.running is not None:
            work = self.works[name] = self.works.pop(text.running)
            if work.has_reader:
                self.lost[text.running] = SessionAttached
            text.running, work.has_reader = name, True

    def restore(self, session: str, name: str | None) -> None:
        """The session is back from a store, with its request, which has no reader."""
        text = self.texts[session]
        assert (text.running is None) == (name is None)
        if name is not None and text.running is not None:
            work = self.works[name] = self.works.pop(text.running)
            text.running, work.has_reader, work.restored = name, False, True

    def take(self, event: Event) -> None:
        """Checks one event of the engine."""
        if isinstance(event, Failed):
            self._fail(event)
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Scored):
            self._score(self.works[event.request_id], event)
        elif isinstance(event, TokenEvent):
            self._draw(self.works[event.request_id], event)
        elif isinstance(event, Finished):
            self._finish(self.works.pop(event.request_id), event)
        else:
            assert isinstance(event, Migrated), event

    def _fail(self, event: Failed) -> None:
        if event.request_id in self.lost:
            assert type(event.error) is self.lost.pop(event.request_id)
        else:  # a choice for which there is no room
            assert isinstance(event.error, CapacityExhausted)
            assert not self.works.pop(event.request_id).started
            assert "/" in event.request_id

    def _start(self, event: Started) -> None:
        work = self.works[event.request_id]
        assert not work.started
        work.started = True
        assert (event.position, event.epoch) == (work.length, work.text.epoch)
        assert self.texts.setdefault(event.session, work.text) is work.text

    def _draw(self, work: Work, event: TokenEvent) -> None:
        text, params = work.text, work.request.sampling
        assert work.started and params is not None
        assert work.scored or not work.request.score or work.restored
        assert not work.grammar_ended
        wanted, work.grammar_ended = text.draw(event.request_id, params)
        assert event == wanted._replace(text=work.stops.push(wanted.text)[0])
        work.num_generated += 1

    def _score(self, work: Work, event: Scored) -> None:
        assert work.request.score
        assert not work.scored
        assert not work.num_generated
        work.scored = True
        logprobs, tops = work.text.scores(work.length, work.request.num_top)
        assert event.token_ids == tuple(work.text.tokens[work.length :])
        assert event.logprobs == (*([None] if self._is_first(work) else []), *logprobs)
        assert event.tops == (*([()] if self._is_first(work) else []), *tops)

    @staticmethod
    def _is_first(work: Work) -> bool:
        return work.length == 0 and bool(work.text.tokens)

    def _finish(self, work: Work, event: Finished) -> None:
        text, params = work.text, work.request.sampling
        if not work.started and "/" in event.request_id:  # a choice whose prompt was cancelled
            assert (event.finish_reason, event.usage) == ("cancelled", Usage(0, 0))
            return
        assert event.finish_reason != "error", event
        assert (event.session is None) != text.keep
        if params is not None:
            text.seq += 1
        assert event.seq == text.seq
        if event.finish_reason == "cancelled":
            assert work.cancelled
            assert event.position >= work.length
            text.cut(event.position)
            if work.request.tokens and event.position == work.length:
                text.end_character()
        elif params is None:
            assert event.finish_reason is None
            self._read(work, event)
        elif event.finish_reason == "stop":
            assert work.grammar_ended or params.stop
        elif event.finish_reason == "length":
            assert work.num_generated == params.max_tokens
        assert event.position == len(text.tokens)
        assert event.usage.completion_tokens == work.num_generated
        assert event.usage.prompt_tokens == event.position - work.length - work.num_generated
        assert event.grammar_ended == work.grammar_ended
        text.running = None
        if not text.keep:
            self.texts = {id: other for id, other in self.texts.items() if other is not text}

    def _read(self, work: Work, event: Finished) -> None:
        """What is known of a text that was only fed."""
        request, text = work.request, work.text
        start = work.length if work.first_scored is None else work.first_scored
        logprobs, tops = text.scores(start, request.num_top)
        is_scored = request.score and not work.restored
        assert event.logprobs == (logprobs if is_scored else None)
        assert event.tops == (tops if is_scored and request.num_top else None)
        assert event.embedding == (text.embedding() if request.embed else None)
