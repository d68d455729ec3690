from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from clients.python import (
    CapacityExhausted,
    Client,
    ConnectionLost,
    Generation,
    InvalidRequest,
    NotFound,
    Session,
    SessionBusy,
    SessionNotFound,
    Token,
)
from tests.reserved_port import ReservedPort


def becomes_idle(session: Session) -> None:
    deadline = time.monotonic() + 60
    while session.info().busy:
        assert time.monotonic() < deadline, "it still runs"


@pytest.fixture
def client(server_url: str) -> Iterator[Client]:
    with Client(server_url, timeout_s=30) as client:
        yield client


def test_generation_streams_tokens_and_ends(client: Client) -> None:
    generation = client.generate("Once", max_tokens=10, seed=1, ignore_eos=True)
    *tokens, last = generation
    assert [event.seq for event in tokens if isinstance(event, Token)] == list(range(1, 11))
    assert generation.started is not None
    assert generation.started.seed == 1
    assert last is generation.finished
    assert generation.finished is not None
    assert generation.finished.finish_reason == "length"
    assert generation.finished.usage.completion_tokens == 10
    assert list(generation) == []


def test_same_text_over_http_and_websocket(client: Client) -> None:
    options = {"max_tokens": 30, "seed": 5, "ignore_eos": True}
    streamed = client.generate("Once upon", **options).text()  # type: ignore[arg-type]
    whole = client.complete("Once upon", **options)  # type: ignore[arg-type]
    assert streamed == whole.text
    assert whole.seed == 5
    assert whole.usage.completion_tokens == 30


def tokens_of(generation: Generation) -> list[int]:
    return [event.token_id for event in generation if isinstance(event, Token)]


def test_session_keeps_its_state_between_requests(client: Client) -> None:
    options = {"seed": 2, "ignore_eos": True}
    whole = tokens_of(client.generate([10, 20, 30, 40], max_tokens=8, **options))  # type: ignore[arg-type]
    session = client.create_session()
    appended = session.append([10, 20])
    assert appended.usage.prompt_tokens == appended.position == 2
    first = tokens_of(session.generate([30, 40], max_tokens=3, **options))  # type: ignore[arg-type]
    rest = tokens_of(session.generate(max_tokens=5, **options))  # type: ignore[arg-type]
    assert first + rest == whole
    info = session.info()
    assert (info.session, info.busy, info.seq) == (session.id, False, 10)
    session.delete()
    with pytest.raises(NotFound):
        session.info()


def test_token_ids_are_taken_as_they_are(client: Client) -> None:
    session = client.create_session()
    assert session.append([5, 6, 7]).position == 3
    session.delete()


def test_two_generations_side_by_side_do_not_mix(client: Client) -> None:
    alone = client.generate("The fox", max_tokens=20, seed=3, ignore_eos=True).text()
    first = client.generate("The fox", max_tokens=20, seed=3, ignore_eos=True)
    second = client.generate("Who lives", max_tokens=20, seed=4, ignore_eos=True)
    text = second.text()
    assert first.text() == alone != text


def test_exit_of_context_manager_cancels(client: Client) -> None:
    session = client.create_session()
    with session.generate("Once", max_tokens=1_000_000, ignore_eos=True) as generation:
        for _ in zip(range(5), generation, strict=False):
            pass
    assert generation.finished is not None
    assert generation.finished.finish_reason == "cancelled"
    info = session.info()
    assert not info.busy
    session.delete()


def test_leaving_a_loop_cancels(client: Client) -> None:
    session = client.create_session()
    for _ in session.generate("Once", max_tokens=1_000_000, ignore_eos=True):
        break
    becomes_idle(session)
    assert session.generate(max_tokens=1, ignore_eos=True).text() is not None
    session.delete()


def test_value_that_json_cannot_carry_is_refused_at_once(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate("\ud800")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        client.complete("x", temperature=math.nan)
    assert caught.value.param == "temperature"


def test_closed_client_raises(server_url: str) -> None:
    with Client(server_url, timeout_s=30) as client:
        generation = client.generate("Once", max_tokens=1_000_000, ignore_eos=True)
        next(generation)
    with pytest.raises(ConnectionLost, match="client was closed"):
        list(generation)
    with pytest.raises(ConnectionLost, match="client was closed"):
        client.generate("x")


def test_errors_are_typed_and_name_the_field(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        list(client.generate("x", temperature=-1.0))
    assert (caught.value.param, caught.value.status) == ("temperature", 400)
    with pytest.raises(InvalidRequest) as caught:
        client.complete("x", top_p=7.0)
    assert caught.value.param == "top_p"
    with pytest.raises(SessionNotFound):
        client.session("sess_unknown").append("x")
    assert client.generate("x", max_tokens=2).text() is not None  # the socket lives on


def test_busy_session_is_an_error(client: Client) -> None:
    session = client.create_session()
    with session.generate("a", max_tokens=1_000_000, ignore_eos=True) as running:
        next(iter(running))
        with pytest.raises(SessionBusy):
            list(session.generate("b"))
    session.delete()


def test_full_server_gives_retry_after(client: Client) -> None:
    sessions = [client.create_session() for _ in range(16)]
    with pytest.raises(CapacityExhausted):
        client.create_session()
    with pytest.raises(CapacityExhausted) as caught:
        client.complete("x", max_tokens=1)
    assert caught.value.retry_after_s is not None
    for session in sessions:
        session.delete()
    assert client.complete("x", max_tokens=1).usage.completion_tokens == 1


def test_models_and_health(client: Client) -> None:
    (model,) = client.models()
    assert model["everstream"]["max_sessions"] == 16
    assert client.health()


def test_no_server_is_a_connection_lost() -> None:
    with ReservedPort() as port, Client(f"http://127.0.0.1:{port.number}", timeout_s=60) as client:
        assert not client.health()
        with pytest.raises(ConnectionLost):
            client.generate("x")
        with pytest.raises(ConnectionLost):
            client.complete("x")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ws://host", "", "http://"])
def test_url_must_be_http(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        Client(url)
