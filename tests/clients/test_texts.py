"""What needs no session: scores, vectors, token ids; and the options of a generation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

import pytest

from clients.python import AsyncClient, Client, InvalidRequest, NotFound, Session, Token

GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def client(server_url: str) -> Iterator[Client]:
    with Client(server_url, timeout_s=30) as client:
        yield client


def test_scores_are_those_of_an_append(client: Client) -> None:
    good, bad = client.score("Once upon", [" a time", " zq#7"], top=2)
    assert (good.index, bad.index) == (0, 1)
    assert good.logprob == pytest.approx(math.fsum(good.token_logprobs))
    assert len(good.tokens) == len(good.token_logprobs) == good.num_tokens
    assert good.top_logprobs is not None
    assert [len(top) for top in good.top_logprobs] == [2] * good.num_tokens
    session = client.create_session()
    session.append("Once upon")
    appended = session.append(good.tokens, logprobs=True)
    assert appended.logprobs == pytest.approx(good.token_logprobs)
    session.delete()


def test_greedy_continuation_is_scored_as_such(client: Client) -> None:
    events = list(client.generate([5, 6, 7], **GREEDY))  # type: ignore[arg-type]
    tokens = [event.token_id for event in events if isinstance(event, Token)]
    other = [*tokens[:-1], (tokens[-1] + 1) % 200]
    scores = client.score([5, 6, 7], [tokens, other])
    assert [score.is_greedy for score in scores] == [True, False]
    assert scores[0].top_logprobs is None


def test_vectors_have_length_one_and_tell_texts_apart(client: Client) -> None:
    same, again, other = client.embed(["Once upon a time", "Once upon a time", "The fox"])
    assert same == again != other
    assert math.hypot(*same) == pytest.approx(1)
    assert client.embed("The fox") == [other]


def test_text_round_trips_through_tokens(client: Client) -> None:
    tokens = client.tokenize("Once upon a time é")
    assert client.detokenize(tokens) == "Once upon a time é"
    assert client.tokenize("") == []


def test_every_route_takes_a_model_by_name(client: Client) -> None:
    (model,) = client.models()
    name = model["id"]
    assert client.tokenize("x", model=name) == client.tokenize("x")
    session = client.create_session(model=name)
    assert client.generate("x", model=name, max_tokens=1).text() is not None
    session.delete()
    for ask in (
        lambda: client.score("x", ["y"], model="other"),
        lambda: client.embed("x", model="other"),
        lambda: client.tokenize("x", model="other"),
        lambda: client.detokenize([1], model="other"),
        lambda: client.complete("x", model="other"),
        lambda: client.create_session(model="other"),
        lambda: client.generate("x", model="other").text(),
    ):
        with pytest.raises(NotFound) as caught:
            ask()
        assert caught.value.code == "model_not_found"


def test_tokens_have_logprobs(client: Client) -> None:
    events = list(client.generate("Once", top_logprobs=3, **GREEDY))  # type: ignore[arg-type]
    tokens = [event for event in events if isinstance(event, Token)]
    assert len(tokens) == 8
    for token in tokens:
        best = token.top_logprobs[0]
        assert (best.token_id, best.logprob) == (token.token_id, token.logprob)
        assert len(token.top_logprobs) == 3
    plain = next(client.generate("Once", **GREEDY))  # type: ignore[arg-type]
    assert isinstance(plain, Token)
    assert (plain.logprob, plain.top_logprobs) == (None, ())


def test_bias_and_filters_reach_the_sampler(client: Client) -> None:
    events = client.generate("Once", logit_bias={7: 100.0}, typical_p=0.9, max_tokens=5)
    assert {event.token_id for event in events if isinstance(event, Token)} == {7}
    with pytest.raises(InvalidRequest) as caught:
        client.generate("Once", typical_p=2.0).text()
    assert caught.value.param == "typical_p"
    with pytest.raises(InvalidRequest) as caught:
        client.generate("Once", top_n_sigma=101.0).text()
    assert caught.value.param == "top_n_sigma"
    nearest = client.generate("Once", top_n_sigma=1e-6, seed=1, max_tokens=20).text()
    assert nearest == client.generate("Once", temperature=0, max_tokens=20).text()


def test_answer_has_the_form_that_was_asked_for(client: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "who": {"enum": ["fox", "wind"]}},
        "required": ["ok", "who"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    said = client.generate("Who?", response_format=form, max_tokens=200, seed=1)
    answer = json.loads(said.text())
    assert isinstance(answer["ok"], bool)
    assert answer["who"] in ("fox", "wind")
    form = {"type": "regex", "regex": "[0-9]{3}-[a-c]+x"}
    assert re.fullmatch(
        "[0-9]{3}-[a-c]+x", client.complete("x", response_format=form, max_tokens=300, seed=2).text
    )


def fail_in_branch(session: Session, at: int | None, ids: list[str]) -> None:
    """Deletes the branch first where it is of the present: no other error may hide this one."""
    with session.branch(at=at) as copy:
        ids.append(copy.id)
        assert copy.info().position == (3 if at is None else at)
        if at is None:
            copy.delete()
        raise ZeroDivisionError


def test_branch_ends_with_its_block(client: Client) -> None:
    session = client.create_session()
    session.append([10, 20, 30])
    with session.branch() as copy:
        copy.append([40])
        assert copy.info().position == 4
    ids = [copy.id]
    for at in (2, None):
        with pytest.raises(ZeroDivisionError):
            fail_in_branch(session, at, ids)
    for gone in ids:
        with pytest.raises(NotFound):
            client.session(gone).info()
    assert session.info().position == 3
    session.delete()


async def test_branch_and_texts_async(server_url: str) -> None:
    async with AsyncClient(server_url, timeout_s=30) as client:
        session = await client.create_session()
        await session.append("Once")
        async with session.branch() as copy:
            assert (await copy.info()).position == (await session.info()).position
        with pytest.raises(NotFound):
            await copy.info()
        await session.delete()
        (score,) = await client.score("Once", [" upon"])
        assert score.logprob < 0
        tokens = await client.tokenize("The fox")
        assert await client.detokenize(tokens) == "The fox"
        assert await client.embed(["The fox"]) == await client.embed("The fox")
