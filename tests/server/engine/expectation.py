"""What clients may expect of sessions: texts, and requests that lengthen them.

The oracle of the engine's tests with random commands. It knows the whole of every
text, so what comes next is worked out from the beginning, without a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from model.tokenizer import Tokenizer
from server.engine.detokenizer import Detokenizer, StopStrings
from server.engine.errors import CapacityExhausted, EngineError, SessionAttached
from server.engine.types import (
    Event,
    Failed,
    Finished,
    Migrated,
    Request,
    SamplingParams,
    Started,
    TokenEvent,
    Usage,
)
from tests.fakes import Hashed


class Text:
    """A session's text, and what is worked out from the whole of it as it grows."""

    def __init__(self, tokenizer: Tokenizer, owner: str, keep: bool) -> None:
        self.owner, self.keep = owner, keep
        self.tokens: list[int] = []
        self.seq = self.epoch = 0
        self.running: str | None = None
        self._tokenizer = tokenizer
        self._drawn: list[bool] = []  # by the model; the others were in prompts
        self._hashes = [Hashed()]
        self._detokenizer = Detokenizer(tokenizer)

    @property
    def hashed(self) -> Hashed:
        return self._hashes[-1]

    def prompt(self, tokens: Sequence[int]) -> None:
        """Tokens that a client has sent; they end what was generated before them."""
        for token in tokens:
            self._add(token, drawn=False)
            self._detokenizer = Detokenizer(self._tokenizer)

    def draw(self, params: SamplingParams) -> tuple[int, str]:
        """The token that must come next, and the text that it completes."""
        token = self.hashed.token(params, self._tokenizer.vocab_size)
        self._add(token, drawn=True)
        return token, self._detokenizer.push(token)

    def cut(self, length: int) -> None:
        assert length <= len(self.tokens)
        tokens, drawn = self.tokens[:length], self._drawn[:length]
        self.tokens, self._drawn, self._hashes = [], [], [Hashed()]
        self._replay(tokens, drawn)

    def copy(self, length: int, keep: bool = True) -> Text:
        """A session with this text and a history of its own."""
        text = Text(self._tokenizer, self.owner, keep)
        text._replay(self.tokens[:length], self._drawn[:length])
        return text

    def _replay(self, tokens: list[int], drawn: list[bool]) -> None:
        self._detokenizer = Detokenizer(self._tokenizer)
        for token, by_model in zip(tokens, drawn, strict=True):
            if by_model:
                self._add(token, drawn=True)
                self._detokenizer.push(token)
            else:
                self.prompt([token])

    def _add(self, token: int, drawn: bool) -> None:
        self.tokens.append(token)
        self._drawn.append(drawn)
        self._hashes.append(self.hashed.after([token]))


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
    stops: StopStrings = field(default_factory=lambda: StopStrings(()))


class Expectation:
    """``texts`` by the sessions' ids, those that are not kept while they run; ``works`` by name."""

    def __init__(self, tokenizer: Tokenizer, bos: int) -> None:
        self.texts: dict[str, Text] = {}
        self.works: dict[str, Work] = {}
        self.lost: dict[str, type[EngineError]] = {}  # what readers must hear that have lost theirs
        self._tokenizer, self._bos = tokenizer, bos

    def submit(self, request: Request) -> None:
        """``request`` was accepted."""
        if request.session is None:
            text = Text(self._tokenizer, request.owner, request.keep)
        else:
            text = self.texts[request.session]
            assert text.running is None
        work = Work(request, text, len(text.tokens))
        if not text.tokens and (request.start or not request.tokens):
            text.prompt([self._bos])
        text.prompt(request.tokens)
        if request.sampling is not None:
            work.stops = StopStrings(request.sampling.stop)
        text.running = request.request_id
        self.works[request.request_id] = work
        for index in range(1, request.num_choices):
            assert request.sampling is not None
            params = replace(request.sampling, seed=request.sampling.seed + index)
            choice = replace(request, request_id=request.ids[index], sampling=params)
            copy = text.copy(len(text.tokens), keep=False)
            self.works[choice.request_id] = Work(choice, copy, len(text.tokens))

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
            text.running, work.has_reader = name, False

    def take(self, event: Event) -> None:
        """Checks one event of the engine."""
        if isinstance(event, Failed):
            self._fail(event)
        elif isinstance(event, Started):
            self._start(event)
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
        assert event.position == len(text.tokens)
        token, completed = text.draw(params)
        assert event.token_id == token
        assert event.text == work.stops.push(completed)[0]
        text.seq += 1
        assert event.seq == text.seq
        work.num_generated += 1

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
        elif params is None:
            assert event.finish_reason is None
        elif event.finish_reason == "length":
            assert work.num_generated == params.max_tokens
        assert event.position == len(text.tokens)
        assert event.usage.completion_tokens == work.num_generated
        assert event.usage.prompt_tokens == event.position - work.length - work.num_generated
        text.running = None
        if not text.keep:
            self.texts = {id: other for id, other in self.texts.items() if other is not text}
