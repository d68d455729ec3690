"""26: an exception in one row fails that request alone; its batch peers equal a solo run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from model.tokenizer import Tokenizer
from server.engine.engine import Engine
from server.engine.runner import Runner
from server.engine.types import Request
from server.errors import SessionNotFound
from tests.reliability.engines import BACKENDS, Model, check_baseline
from tests.reliability.faulty_runner import FaultyRunner, after, never
from tests.server.engine.ledger import Ledger
from tests.tiny import drain, finished, request, solo, tiny_tokenizer, tokens_of

#: No peer's text gets so long.
LIMIT = 100
PEERS = [
    request(f"peer-{i}", range(1 + i, 20 + 3 * i), seed=i, max_tokens=30, repetition_penalty=1.1)
    for i in range(5)
]
IN_ITS_PROMPT = request("culprit", range(1, 250), max_tokens=10)
IN_ITS_TOKENS = request("culprit", range(1, 80), max_tokens=100)


@pytest.fixture(params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.fixture
def alone(model: Model) -> dict[str, list[int]]:
    engine = model.engine()
    return {req.request_id: tokens_of(solo(engine, req)) for req in (*PEERS, IN_ITS_TOKENS)}


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = model.engine(wrap=lambda runner: FaultyRunner(runner, after(LIMIT)))
    yield engine
    check_baseline(engine)


def together(engine: Engine, culprit: Request) -> dict[str, list[int]]:
    """The culprit in the middle of its peers; their tokens, all having begun at once."""
    for req in (*PEERS[:3], culprit, *PEERS[3:]):
        engine.submit(req, 0.0)
    events = drain(engine)
    last = finished(events["culprit"])
    assert (last.finish_reason, last.error) == ("error", "the engine could not do this")
    for req in PEERS:
        assert finished(events[req.request_id]).finish_reason == "length"
    return {name: tokens_of(found) for name, found in events.items()}


@pytest.mark.parametrize("culprit", [IN_ITS_PROMPT, IN_ITS_TOKENS], ids=["prompt", "tokens"])
def test_failing_row_does_not_affect_its_batch(
    engine: Engine, alone: dict[str, list[int]], culprit: Request
) -> None:
    found = together(engine, culprit)
    assert {name: found[name] for name in found if name != "culprit"} == {
        req.request_id: alone[req.request_id] for req in PEERS
    }


def test_row_keeps_its_tokens_before_the_failure(
    engine: Engine, alone: dict[str, list[int]]
) -> None:
    found = together(engine, IN_ITS_TOKENS)["culprit"]
    prompt = 80  # with the start token
    assert found == alone["culprit"][: LIMIT + 2 - prompt]


def test_session_of_a_failed_row_continues_from_its_store(
    model: Model, alone: dict[str, list[int]]
) -> None:
    """Nothing of the failure is in what is kept of it."""
    runners: list[FaultyRunner] = []

    def wrap(runner: Runner) -> Runner:
        runners.append(FaultyRunner(runner, after(LIMIT)))
        return runners[-1]

    engine, ledger = model.engine(wrap=wrap, save_interval=7, can_evict=True), Ledger()
    session = engine.kept.create("me", 0.0).session
    req = request("culprit", range(1, 80), session, max_tokens=100)
    failed = solo(engine, req)
    assert finished(failed).finish_reason == "error"
    with pytest.raises(SessionNotFound):
        engine.kept.info(session, "me", 0.0)
    ledger.take(engine.take_records())
    runners[0].fault = never
    engine.kept.restore(ledger.past(session), 0.0)
    num_left = 100 - len(tokens_of(failed))
    rest = solo(engine, request("rest", (), session, max_tokens=num_left))
    assert tokens_of(failed) + tokens_of(rest) == alone["culprit"]
    check_baseline(engine)


def test_failure_while_scoring_is_that_request_s_alone(
    engine: Engine, alone: dict[str, list[int]]
) -> None:

    session = engine.kept.create("me", 0.0).session
    culprit = replace(request("culprit", range(1, 250), session, generate=False), score=True)
    found = together(engine, culprit)
    assert all(found[req.request_id] == alone[req.request_id] for req in PEERS)


def test_failure_after_the_runner_s_part_is_that_request_s_alone(
    model: Model, alone: dict[str, list[int]]
) -> None:
    """A token that cannot be shown: only those who draw it fail."""
    broken = next(
        token
        for token in alone["peer-0"]
        if not all(token in alone[req.request_id] for req in PEERS[1:])
    )
    engine = model.engine(tokenizer=cast(Tokenizer, BrokenTokenizer(broken)))
    for req in PEERS:
        engine.submit(req, 0.0)
    events = drain(engine)
    for name in (req.request_id for req in PEERS):
        tokens, reason = tokens_of(events[name]), finished(events[name]).finish_reason
        if broken in alone[name]:
            assert (tokens, reason) == (alone[name][: alone[name].index(broken)], "error")
        else:
            assert (tokens, reason) == (alone[name], "length")
    check_baseline(engine)


def test_log_of_a_failure_shows_no_text(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    together(engine, IN_ITS_PROMPT)
    (record,) = caplog.records
    assert record.__dict__["request_id"] == "culprit"
    assert "RuntimeError: a row at" in caplog.text
    assert "100, 101, 102" not in caplog.text


class BrokenTokenizer:
    """The tiny one, but for one token."""

    eos_token_ids = tiny_tokenizer().eos_token_ids
    silent_ids = tiny_tokenizer().silent_ids

    def __init__(self, broken: int) -> None:
        self._broken = broken

    def token_bytes(self, id: int) -> bytes:
        if id == self._broken:
            raise ArithmeticError(id)
        return tiny_tokenizer().token_bytes(id)

    first_bytes = token_bytes
