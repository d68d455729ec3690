"""The weakest model there is: it draws uniformly from the tokens that may come."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import jsonschema
import numpy as np

from model.bundled_models import DEFAULT_MODEL
from model.tokenizer import Tokenizer
from server.constraints.compiler import GrammarMatcher
from server.constraints.grammar import (
    GrammarEndings,
    Vocabulary,
    costs_of,
    grammar_text,
    ids_of,
    with_costs,
)


class Drawn(NamedTuple):
    """A text, and whether it came to its end within the budget."""

    text: str
    ended: bool


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEFAULT_MODEL / "tokenizer.json")


@cache
def vocabulary() -> Vocabulary:
    its = tokenizer()
    tokens = [its.token_bytes(id) for id in range(its.vocab_size)]
    return Vocabulary(tokens, its.eos_token_id, its.encode)


@cache
def endings() -> GrammarEndings:
    return GrammarEndings(vocabulary())


def compiled(format: dict[str, Any]) -> str:
    """Its grammar text, made in this process."""
    return _compiled(grammar_text(format))


@cache
def _compiled(text: str) -> str:
    return with_costs(text, vocabulary())


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def matcher(grammar: str) -> GrammarMatcher:
    place = vocabulary().matcher(grammar)
    return GrammarMatcher(vocabulary(), endings(), place, *costs_of(grammar))


def draw(grammar: str, seed: int, budget: int, start: GrammarMatcher | None = None) -> Drawn:
    """A text of at most ``budget`` tokens."""
    choose, place = random.Random(seed), start or matcher(grammar)
    tokens: list[int] = []
    while len(tokens) < budget:
        ids = ids_of(place.allowed(budget - len(tokens)))
        assert ids.size, (grammar, tokens)
        token = int(ids[choose.randrange(ids.size)])
        if token == tokenizer().eos_token_id:
            return Drawn(text_of(tokens), ended=True)
        place.accept(token)
        tokens.append(token)
        if place.is_over():
            return Drawn(text_of(tokens), ended=True)
    return Drawn(text_of(tokens), ended=False)


def text_of(tokens: list[int]) -> str:
    """Raises where they are no UTF-8."""
    return b"".join(map(tokenizer().token_bytes, tokens)).decode()


def budgets(grammar: str) -> tuple[int, int, int]:
    """The least that an end fits into, a little more, and much more."""
    least = len(costs_of(grammar).ending)
    return least, least + 7, least + 120


def accepts(grammar: str, text: str) -> bool:
    """Whether ``text`` is one of the grammar's, read a token at a time."""
    place = matcher(grammar)
    for token in tokenizer().encode(text):
        if not np.isin(token, ids_of(place.allowed())):
            return False
        place.accept(token)
    return place.is_over() or bool(np.isin(tokenizer().eos_token_id, ids_of(place.allowed())))


def shown(format: dict[str, Any]) -> str:
    return json.dumps(format)[:100]


def exact(value: Any) -> Any:
    """With its numbers as they are written."""
    return json.loads(value if isinstance(value, str) else json.dumps(value), parse_float=Decimal)


def check(schema: dict[str, Any], *seeds: int, means: dict[str, Any] | None = None) -> list[str]:
    """Texts of ``schema``, each of which another library finds valid, as ``means`` says."""
    meaning = schema if means is None else means
    jsonschema.Draft202012Validator.check_schema(meaning)
    validator = jsonschema.Draft202012Validator(exact(meaning))
    grammar = compiled(of_schema(schema))
    texts = []
    *narrow, wide = budgets(grammar)
    # Most of the time goes to long texts: those of one seed are enough.
    for seed, budget in [*product(seeds or range(3), narrow), (seeds[0] if seeds else 0, wide)]:
        text, ended = draw(grammar, seed, budget)
        assert ended, (schema, budget, text)
        validator.validate(exact(text))
        texts.append(text)
    return texts
