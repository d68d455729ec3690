"""The oracle's side of a session: its whole text, from which all else is worked out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model.tokenizer import Tokenizer
from server.engine.session import Constraint
from server.engine.text import Detokenizer
from server.engine.types import Request, SamplingParams, TokenEvent, Top
from tests.fakes import Hashed
from tests.server.engine.grammars import FakeMatcher
from tests.server.engine.reading import hidden_of, logprob_of, top_of

EOS = 0


class Text:
    """A session's text, and what is worked out from the whole of it as it grows.

    Under a grammar ``constraint`` is what a session must have; at one length of the
    text there can have been several, one after the other.
    """

    def __init__(self, tokenizer: Tokenizer, owner: str, keep: bool) -> None:
        self.owner, self.keep = owner, keep
        self.tokens: list[int] = []
        self.seq = self.epoch = 0
        self.running: str | None = None
        self.constraint: Constraint | None = None
        self._tokenizer = tokenizer
        self._drawn: list[bool] = []  # by the model; the others were in prompts
        self._hashes = [Hashed()]
        self._detokenizer = Detokenizer(tokenizer)
        self._constraints: list[list[Constraint | None]] = [[None]]
        self._matcher: FakeMatcher | None = None

    @property
    def hashed(self) -> Hashed:
        return self._hashes[-1]

    def begin(self, request: Request, tokens: Sequence[int]) -> None:
        """What a request brings, with a start token, if there is one."""
        self.prompt(tokens)
        grammar = None if request.sampling is None else request.sampling.grammar
        if grammar is not None:
            self._constrain(Constraint(grammar))
        elif request.tokens:
            self._constrain(None)

    def prompt(self, tokens: Sequence[int]) -> None:
        """Tokens that a client has sent; they end what was generated before them."""
        for token in tokens:
            self._add(token, drawn=False)
            self._detokenizer = Detokenizer(self._tokenizer)

    def draw(self, request_id: str, params: SamplingParams) -> tuple[TokenEvent, bool]:
        """What must come next, with the text that it completes; whether a grammar ends it."""
        before, place = self.hashed, len(self.tokens)
        matcher, allowed = self._follow(), None
        if matcher is not None:
            allowed = matcher.allowed(params.max_tokens)
        token = before.token(params, self._tokenizer.vocab_size, allowed)
        self._add(token, drawn=True)
        ended = False
        if matcher is not None:
            assert self.constraint is not None
            if token != EOS:
                matcher.accept(token)
            ended = token == EOS or matcher.is_over()
            grammar, tokens = self.constraint
            if ended:
                self._constrain(None)
            else:
                self._constrain(Constraint(grammar, (*tokens, token)), matcher)
        self.seq += 1
        text = self._detokenizer.push(token)
        event = TokenEvent(request_id, self.seq, place, token, text)
        if params.top_logprobs is not None:
            top = top_of(before, params.top_logprobs)
            event = event._replace(logprob=logprob_of(before, token), top=top)
        return event, ended

    def scores(self, start: int, num_top: int) -> tuple[tuple[float, ...], tuple[Top, ...]]:
        """Of the tokens from ``start`` on; the first of the text has none."""
        places = range(max(start, 1), len(self.tokens))
        return (
            tuple(logprob_of(self._hashes[at], self.tokens[at]) for at in places),
            tuple(top_of(self._hashes[at], num_top) for at in places),
        )

    def embedding(self) -> tuple[float, ...]:
        states = [hidden_of(after) for after in self._hashes[1:]]
        return tuple((np.sum(states, axis=0) / len(states)).tolist())

    def cut(self, length: int) -> None:
        """To its first ``length`` tokens; under the grammar that it follows now."""
        assert length <= len(self.tokens)
        constraint = self.constraint
        tokens, drawn = self.tokens[:length], self._drawn[:length]
        constraints = self._constraints[: length + 1]
        self.tokens, self._drawn, self._hashes = [], [], [Hashed()]
        self._replay(tokens, drawn)
        self._constraints = constraints
        self._constrain(constraint)

    def end_character(self) -> None:
        """Another text had begun after this one: a character that was unfinished has ended."""
        self._detokenizer = Detokenizer(self._tokenizer)

    def copy(self, length: int, keep: bool = True) -> Text:
        """A session with this text and a history of its own."""
        text = Text(self._tokenizer, self.owner, keep)
        text._replay(self.tokens[:length], self._drawn[:length])
        text._constrain(self.constraint)
        return text

    def was_under(self, constraint: Constraint | None, length: int) -> bool:
        """Whether it followed ``constraint`` when it had so many tokens."""
        return constraint in self._constraints[length]

    def go_on_under(self, constraint: Constraint | None) -> None:
        """It has been put back to where it followed ``constraint``."""
        self._constrain(constraint)

    def _constrain(self, constraint: Constraint | None, matcher: FakeMatcher | None = None) -> None:
        self.constraint, self._matcher = constraint, matcher
        self._constraints[len(self.tokens)].append(constraint)

    def _follow(self) -> FakeMatcher | None:
        if self._matcher is None and self.constraint is not None:
            grammar, tokens = self.constraint
            self._matcher = FakeMatcher(grammar, self._tokenizer.vocab_size, EOS)
            for token in tokens:
                self._matcher.accept(token)
        return self._matcher

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
        self._constraints.append([] if drawn and self.constraint is not None else [None])
