"""What becomes of each kind of request when its connection ends, by a server that is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from websockets.sync.server import ServerConnection

from clients.python import (
    AuthenticationError,
    Backoff,
    Client,
    ConnectionLost,
    KeyInUse,
    ProtocolError,
    Session,
    SessionReset,
    Token,
)
from tests.clients.stub import Message, Stub, answering, finished, started, token

PASSING_CODES = (1001, 1011, 1012, 1013)
LASTING_CODES = (1000, 1002, 1003, 1007, 1008, 1009)
RESUME_AT_2 = {"session": "sess_1", "epoch": "store-0", "last_seq": 2}

Answer = Callable[[ServerConnection, Message, int], None]


def resumed(message: Message, seq: int, last_seq: int, *, busy: bool = True) -> str:
    kept = {"session": "sess_1", "epoch": "store-0", "position": 9}
    fields = {"type": "resumed", "request_id": message["request_id"], **kept}
    return json.dumps({**fields, "seq": seq, "last_seq": last_seq, "busy": busy})


def refused(message: Message, status: int, code: str) -> str:
    error = {"message": code, "type": "t", "param": None, "code": code}
    fields = {"type": "error", "request_id": message["request_id"]}
    return json.dumps({**fields, "status": status, "error": error})


@contextmanager
def in_turn(*answers: Answer) -> Iterator[Stub]:
    """A server that answers its n-th message by the n-th of ``answers``, then by the last."""
    count, lock = [0], threading.Lock()

    def answer(connection: ServerConnection, message: Message) -> None:
        with lock:
            number = count[0]
            count[0] += 1
        answers[min(number, len(answers) - 1)](connection, message, number)

    with answering(answer) as stub:
        yield stub


def closing(code: int) -> Answer:
    return lambda connection, message, number: connection.close(code)


def two_tokens_then(code: int) -> Answer:
    def answer(connection: ServerConnection, message: Message, number: int) -> None:
        connection.send(started(message))
        for seq in (1, 2):
            connection.send(token(message, seq, str(seq)))
        connection.close(code)

    return answer


def the_rest(connection: ServerConnection, message: Message, number: int) -> None:
    connection.send(resumed(message, 2, 3))
    connection.send(token(message, 3, "3"))
    connection.send(finished(message, "length", seq=4))


def kept_text(client: Client) -> str:
    return client.generate("a", keep=True).text()


def saying(*frames: Callable[[Message], str]) -> Answer:
    def answer(connection: ServerConnection, message: Message, number: int) -> None:
        for frame in frames:
            connection.send(frame(message))

    return answer


def eager() -> Backoff:
    """Waits that are hardly any; the time that they may take is real."""
    return Backoff(first_s=0.001, most_s=0.01)


@pytest.mark.parametrize("code", PASSING_CODES)
def test_transient_close_is_followed_by_a_resume(code: int) -> None:
    with in_turn(two_tokens_then(code), the_rest) as stub:
        with Client(stub.url, backoff=eager()) as client:
            assert kept_text(client) == "123"
        first, second = stub.next_message("generate"), stub.next_message("resume")
    assert second == {"type": "resume", "request_id": first["request_id"], **RESUME_AT_2}


@pytest.mark.parametrize("code", LASTING_CODES)
def test_permanent_close_is_an_error(code: int) -> None:
    with in_turn(two_tokens_then(code)) as stub, Client(stub.url, backoff=eager()) as client:
        with pytest.raises(ConnectionLost, match="can be read on"):
            kept_text(client)
        assert stub.messages.qsize() == 1


def test_without_time_to_reconnect_the_end_is_an_error() -> None:
    with in_turn(two_tokens_then(1012)) as stub, Client(stub.url, reconnect_s=0) as client:
        generation = client.generate("a", keep=True)
        events = [next(generation), next(generation)]
        with pytest.raises(ConnectionLost, match="1012"):
            next(generation)
        assert [event.text for event in events] == ["1", "2"]
        assert (generation.session, generation.epoch) == ("sess_1", "store-0")
        assert generation.last_seq == 2


def test_server_that_never_comes_back_is_an_error_after_the_time() -> None:
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    with in_turn(two_tokens_then(1012), closing(1012)) as stub:
        backoff = Backoff(sleep=sleep, clock=lambda: sum(waits))
        with Client(stub.url, reconnect_s=30, backoff=backoff) as client:
            generation = client.generate("a", keep=True)
            with pytest.raises(ConnectionLost, match="can be read on"):
                generation.text()
    assert generation.last_seq == 2
    assert sum(waits) == pytest.approx(30)
    assert waits[0] <= 0.1
    assert max(waits) <= 5


@pytest.mark.parametrize("code", ["session_attached", "key_in_use", "draining", "migrated"])
def test_transient_refusal_is_retried(code: str) -> None:
    status = 409 if code in ("session_attached", "key_in_use") else 503
    again = saying(lambda message: refused(message, status, code))
    with in_turn(two_tokens_then(1012), again, again, the_rest) as stub:
        with Client(stub.url, backoff=eager()) as client:
            assert kept_text(client) == "123"
        assert [stub.next_message("resume")["last_seq"] for _ in range(3)] == [2, 2, 2]


def test_lasting_refusal_is_raised() -> None:
    wrong = saying(lambda message: refused(message, 401, "invalid_api_key"))
    with (
        in_turn(two_tokens_then(1012), wrong) as stub,
        Client(stub.url, backoff=eager()) as client,
        pytest.raises(AuthenticationError),
    ):
        kept_text(client)


def test_refusal_of_a_first_try_is_an_error_at_once() -> None:
    used = saying(lambda message: refused(message, 409, "key_in_use"))
    with in_turn(used) as stub, Client(stub.url) as client, pytest.raises(KeyInUse):
        client.generate("a", keep=True, idempotency_key="k").text()


def test_reset_is_an_error_as_in_an_explicit_resume() -> None:
    def reset(message: Message) -> str:
        fields = json.loads(resumed(message, 7, 7, busy=False))
        return json.dumps({**fields, "type": "reset", "reason": "rewound"})

    with (
        in_turn(two_tokens_then(1012), saying(reset)) as stub,
        Client(stub.url, backoff=eager()) as client,
        pytest.raises(SessionReset, match="rewound"),
    ):
        kept_text(client)


def test_event_that_comes_twice_is_dropped_and_a_gap_is_an_error() -> None:
    twice = saying(
        lambda m: resumed(m, 2, 3), lambda m: token(m, 2, "2"), lambda m: token(m, 3, "3")
    )
    end = saying(lambda m: resumed(m, 3, 4), lambda m: finished(m, "length", seq=4))

    def twice_and_end(connection: ServerConnection, message: Message, number: int) -> None:
        twice(connection, message, number)
        connection.close(1012)

    with (
        in_turn(two_tokens_then(1012), twice_and_end, end) as stub,
        Client(stub.url, backoff=eager()) as client,
    ):
        assert kept_text(client) == "123"
    gap = saying(lambda m: resumed(m, 2, 9), lambda m: token(m, 4, "4"))
    with (
        in_turn(two_tokens_then(1012), gap) as stub,
        Client(stub.url, backoff=eager()) as client,
        pytest.raises(ProtocolError, match="event 4 came after 2"),
    ):
        kept_text(client)


def test_session_that_stopped_meanwhile_is_no_end_of_a_generation() -> None:
    idle = saying(lambda message: resumed(message, 2, 2, busy=False))
    with (
        in_turn(two_tokens_then(1012), idle) as stub,
        Client(stub.url, backoff=eager()) as client,
        pytest.raises(ConnectionLost, match="stopped"),
    ):
        kept_text(client)


def test_generation_that_keeps_nothing_is_lost_with_its_connection() -> None:
    with in_turn(two_tokens_then(1012)) as stub, Client(stub.url, backoff=eager()) as client:
        with pytest.raises(ConnectionLost, match="not kept"):
            client.generate("a").text()
        assert stub.messages.qsize() == 1


def test_generation_under_a_key_is_sent_again_where_nothing_had_come() -> None:
    whole = saying(started, lambda m: token(m, 1, "1"), lambda m: finished(m, "length", seq=2))
    with in_turn(closing(1012), whole) as stub:
        with Client(stub.url, backoff=eager()) as client:
            assert client.generate("a", keep=True, idempotency_key="k").text() == "1"
        assert stub.next_message("generate") == stub.next_message("generate")


ASKS: dict[str, Callable[[Client, Session], object]] = {
    "create": lambda client, session: client.create_session(),
    "fork": lambda client, session: session.fork(),
    "rewind": lambda client, session: session.rewind(0),
    "delete": lambda client, session: session.delete(),
    "append": lambda client, session: session.append("x"),
    "generate": lambda client, session: session.generate("x").text(),
}


@pytest.mark.parametrize("kind", ASKS)
def test_request_that_may_have_run_is_not_sent_again(kind: str) -> None:
    with in_turn(closing(1012)) as stub, Client(stub.url, backoff=eager()) as client:
        session = client.session("sess_1")
        with pytest.raises(ConnectionLost, match=f"whether the {kind} was done is not known"):
            ASKS[kind](client, session)
        assert stub.messages.qsize() == 1


def test_server_that_is_silent_on_resume_is_an_error() -> None:
    with in_turn(two_tokens_then(1012), saying()) as stub:
        with Client(stub.url, backoff=eager()) as client:
            generation = client.generate("a", keep=True)
            assert [next(generation).text for _ in range(2)] == ["1", "2"]
            client._client._stream._timeout_s = 0.3
            with pytest.raises(ConnectionLost, match="no event within"):
                next(generation)
        asked = stub.next_message("resume")
        assert stub.next_message("detach")["request_id"] == asked["request_id"]


def test_detach_from_a_lost_generation_asks_nothing_more() -> None:
    with in_turn(two_tokens_then(1012), closing(1012)) as stub:
        with Client(stub.url, reconnect_s=600, backoff=Backoff(first_s=500, most_s=500)) as client:
            generation = client.generate("a", keep=True)
            assert [next(generation).text for _ in range(2)] == ["1", "2"]
            generation.detach()
            assert list(generation) == []
        kinds = [stub.messages.get()["type"] for _ in range(stub.messages.qsize())]
        assert "resume" not in kinds


def test_client_that_is_closed_waits_for_no_server() -> None:
    with in_turn(two_tokens_then(1012)) as stub:
        client = Client(stub.url, reconnect_s=600, backoff=Backoff(first_s=500, most_s=500))
        generation = client.generate("a", keep=True)
        assert isinstance(next(generation), Token)
        client.close()
        with pytest.raises(ConnectionLost):
            list(generation)
