"""What is read of a text: how probable its tokens were, and the mean of its hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.native.runtime import Runtime
from server.engine.engine import Engine
from server.engine.runner import Feed
from server.engine.types import Event, Request, Scored, Usage
from tests.server.engine.ledger import Ledger
from tests.server.engine.runners import make_pool, make_runner
from tests.tiny import (
    drain,
    finished,
    request,
    solo,
    state_of,
    tiny_checkpoint,
    tokens_of,
)

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 170))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


@pytest.fixture
def session(engine: Engine) -> str:
    return engine.kept.create("me", 0.0).session


def score(tokens: tuple[int, ...], session: str | None, start: bool = True) -> Request:
    return replace(request("s", tokens, session, generate=False, start=start), score=True)


def scores(engine: Engine, tokens: tuple[int, ...], session: str | None) -> tuple[float, ...]:
    logprobs = finished(solo(engine, score(tokens, session))).logprobs
    assert logprobs is not None
    return logprobs


def by_the_model(text: tuple[int, ...]) -> list[float]:
    """Of all tokens but the first."""
    logits = tiny_checkpoint().model.parallel(torch.tensor([text[:-1]]))[0].float()
    found = logits.log_softmax(dim=-1)[torch.arange(len(text) - 1), list(text[1:])]
    return list(found.tolist())


def test_scores_are_the_model_s(engine: Engine, session: str) -> None:
    assert scores(engine, PROMPT, session) == pytest.approx(by_the_model((0, *PROMPT)), abs=1e-4)


def test_prompt_in_pieces_has_the_scores_of_the_whole(engine: Engine, session: str) -> None:
    found: tuple[float, ...] = ()
    for start, end in ((0, 1), (1, 2), (2, 70), (70, 169)):
        piece = scores(engine, PROMPT[start:end], session)
        assert len(piece) == end - start
        found += piece
    assert found == pytest.approx(by_the_model((0, *PROMPT)), abs=1e-4)


def test_scores_follow_what_was_generated(engine: Engine, session: str) -> None:
    tokens = tokens_of(solo(engine, request("r", PROMPT, session)))
    text = (0, *PROMPT, *tokens, 5, 6, 7)
    assert scores(engine, (5, 6, 7), session) == pytest.approx(by_the_model(text)[-3:], abs=1e-4)


def test_scoring_leaves_the_bits_that_reading_leaves(engine: Engine, session: str) -> None:
    other = engine.kept.create("me", 0.0).session
    scores(engine, PROMPT, session)
    solo(engine, request("a", PROMPT, other, generate=False))
    assert state_of(engine, session) == state_of(engine, other)
    ends = [tokens_of(solo(engine, request("r", (5,), name))) for name in (session, other)]
    assert ends[0] == ends[1]


def test_scores_do_not_depend_on_the_batch(engine: Engine, session: str) -> None:
    other = engine.kept.create("me", 0.0).session
    alone = scores(engine, PROMPT, session)
    for i in range(3):
        engine.submit(request(f"{i}", PROMPT[i:], max_tokens=30), 0.0)
    engine.step(0.0)
    engine.submit(score(PROMPT, other), 0.0)
    assert finished(drain(engine)["s"]).logprobs == alone


def test_cancelled_scoring_gives_the_scores_so_far(engine: Engine, session: str) -> None:
    engine.submit(score(PROMPT, session), 0.0)
    engine.step(0.0)
    engine.cancel("s")
    last = finished(drain(engine)["s"])
    assert last.logprobs is not None
    assert len(last.logprobs) == last.position - 1
    assert last.logprobs == pytest.approx(by_the_model((0, *PROMPT))[: last.position - 1], abs=1e-4)


def test_scores_come_with_the_most_probable_tokens(engine: Engine, session: str) -> None:
    last = finished(solo(engine, replace(score(PROMPT, session), num_top=3)))
    assert last.logprobs is not None
    assert last.tops is not None
    logits = tiny_checkpoint().model.parallel(torch.tensor([(0, *PROMPT[:-1])]))[0].float()
    best = logits.log_softmax(dim=-1).topk(3, dim=-1)
    for top, found, values, token, logprob in zip(
        last.tops, best.indices.tolist(), best.values.tolist(), PROMPT, last.logprobs, strict=True
    ):
        assert [id for id, _ in top] == found
        assert [value for _, value in top] == pytest.approx(values, abs=1e-4)
        assert dict(top).get(token, logprob) == logprob


def asked(tokens: tuple[int, ...], session: str | None = None, **options: object) -> Request:
    req = request("r", tokens, session, **options)  # type: ignore[arg-type]
    return replace(req, score=True, num_top=2)


def scored(events: list[Event]) -> Scored:
    (found,) = [event for event in events if isinstance(event, Scored)]
    return found


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("tokens", [(7,), (7, 8), PROMPT])
def test_prompt_of_a_generation_has_a_score_for_every_token_but_the_first(
    engine: Engine, tokens: tuple[int, ...], start: bool
) -> None:
    events = solo(engine, asked(tokens, start=start))
    only_fed = replace(asked(tokens, start=start), sampling=None)
    wanted = finished(solo(engine, only_fed))
    found = scored(events)
    assert wanted.tops is not None
    assert found.token_ids == ((0, *tokens) if start else tokens)
    assert found.logprobs == (None, *(wanted.logprobs or ()))
    assert found.tops == ((), *wanted.tops)
    assert finished(events).logprobs is None


def test_later_prompt_of_a_session_is_scored_whole(engine: Engine) -> None:
    session = engine.kept.create("me", 0.0).session
    text = (0, *PROMPT, *tokens_of(solo(engine, request("a", PROMPT, session))), 5, 6, 7)
    found = scored(solo(engine, asked((5, 6, 7), session)))
    whole = scored(solo(engine, asked(text, start=False)))
    assert found.token_ids == (5, 6, 7)
    assert found.logprobs == pytest.approx(whole.logprobs[-3:], abs=1e-4)


def test_cancelled_prompt_of_a_generation_has_no_scores(engine: Engine) -> None:
    engine.submit(asked(PROMPT), 0.0)
    engine.step(0.0)
    engine.cancel("r")
    events = drain(engine)["r"]
    assert not any(isinstance(event, Scored) for event in events)
    assert finished(events).logprobs is None


def test_prompt_that_was_being_read_in_a_crash_is_generated_from(
    make_engine: MakeEngine,
) -> None:
    """What had been noted of it is lost; its text is not."""
    ledger, first, second = Ledger(), make_engine(), make_engine()
    first.submit(replace(asked(PROMPT, max_tokens=20), keep=True), 0.0)
    first.step(0.0)
    ledger.take(first.take_records())
    (session,) = ledger.entries
    second.kept.restore(ledger.past(session), 0.0)
    second.unpark("r")
    events = drain(second)["r"]
    assert not any(isinstance(event, Scored) for event in events)
    assert tokens_of(events) == tokens_of(solo(first, request("s", PROMPT, max_tokens=20)))


def embed(tokens: tuple[int, ...] = PROMPT, **options: object) -> Request:
    req = request("e", tokens, generate=False, **options)  # type: ignore[arg-type]
    return replace(req, embed=True)


def embedding(engine: Engine, tokens: tuple[int, ...], start: bool = True) -> tuple[float, ...]:
    found = finished(solo(engine, embed(tokens, start=start))).embedding
    assert found is not None
    return found


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 169])
def test_embedding_is_the_mean_over_all_tokens_the_last_one_included(
    engine: Engine, runtime: Runtime | None, length: int
) -> None:
    runner = make_runner("torch" if runtime is None else "native", make_pool())
    text = PROMPT[:length]
    states = [runner.embed(Feed(1, n, [token])) for n, token in enumerate(text)]
    found = embedding(engine, text, start=False)
    assert found == pytest.approx(np.mean(states, axis=0), abs=1e-5)
    assert any(found)


def test_start_token_is_one_of_those_that_are_embedded(engine: Engine) -> None:
    assert embedding(engine, PROMPT) == embedding(engine, (0, *PROMPT), start=False)
    assert finished(solo(engine, embed((7,)))).usage == Usage(2, 0)


def test_batch_does_not_change_a_bit_of_an_embedding(engine: Engine) -> None:
    """Which shares the tokens of a step, so that others cut the text."""
    alone = embedding(engine, PROMPT)
    for n in range(3):
        engine.submit(request(f"{n}", PROMPT[n:], max_tokens=30), 0.0)
    engine.step(0.0)
    engine.submit(embed(), 0.0)
    engine.submit(replace(embed(PROMPT[5:]), request_id="f"), 0.0)
    events = drain(engine)
    assert finished(events["e"]).embedding == alone
    assert finished(events["f"]).embedding == embedding(engine, PROMPT[5:])


def test_cancelled_embedding_is_none(engine: Engine) -> None:
    engine.submit(embed(), 0.0)
    engine.step(0.0)
    engine.cancel("e")
    last = finished(drain(engine)["e"])
    assert (last.finish_reason, last.embedding) == ("cancelled", None)
    assert engine.stats().num_sessions == 0
