"""What a client makes of a server that breaks off, says nothing, or says nonsense."""

from __future__ import annotations

import asyncio
import threading

import pytest
from websockets.sync.server import ServerConnection

from clients.python import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectionLost,
    InternalServerError,
    InvalidRequest,
    ProtocolError,
)
from tests.clients.stub import Message, answering, created, finished, started, token

NUM_FLOOD = 5000


def say_nonsense(connection: ServerConnection, message: Message) -> None:
    connection.send("not JSON")


def say_no_more(connection: ServerConnection, message: Message) -> None:
    """Creates a session, and accepts every other message."""
    if message["type"] == "create":
        connection.send(created(message))


def grow_impatient(client: AsyncClient) -> None:
    """From now on, as to connect may take longer."""
    client._stream._timeout_s = 0.2


def break_off_at_b(connection: ServerConnection, message: Message) -> None:
    if message["type"] == "create":
        connection.send(created(message))
    elif message["type"] == "generate":
        connection.send(started(message))
        if message["prompt"] == "b":
            connection.close(1012, "the server is draining")


def cannot_read(connection: ServerConnection, message: Message) -> None:
    error = '{"message": "not JSON", "type": "t", "param": null, "code": "invalid_value"}'
    connection.send(f'{{"type": "error", "request_id": null, "status": 400, "error": {error}}}')


def flood(connection: ServerConnection, message: Message) -> None:
    """More than the buffers of a connection hold, so that somebody must read it."""
    if message["type"] == "create":
        connection.send(created(message))
        return
    for seq in range(1, NUM_FLOOD + 1):
        connection.send(token(message, seq, "x" * 4000))
    connection.send(finished(message, "length"))


def test_invalid_answer_is_a_protocol_error() -> None:
    with answering(say_nonsense) as stub, Client(stub.url) as client, pytest.raises(ProtocolError):
        client.create_session()


async def test_invalid_answer_is_a_protocol_error_async() -> None:
    with answering(say_nonsense) as stub:
        async with AsyncClient(stub.url) as client:
            with pytest.raises(ProtocolError):
                await client.create_session()


def test_silent_server_is_an_error_and_detaches() -> None:
    with answering(say_no_more) as stub, Client(stub.url) as client:
        client.create_session()
        grow_impatient(client._client)
        generation = client.generate("a")
        with pytest.raises(ConnectionLost, match="no event within"):
            next(generation)
        assert stub.next_message("detach")["request_id"] == generation.request_id
        assert list(generation) == []


async def test_silent_server_is_an_error_and_detaches_async() -> None:
    with answering(say_no_more) as stub:
        async with AsyncClient(stub.url) as client:
            await client.create_session()
            grow_impatient(client)
            generation = await client.generate("a")
            with pytest.raises(ConnectionLost, match="no event within"):
                await anext(generation)
            detach = await asyncio.to_thread(stub.next_message, "detach")
    assert detach["request_id"] == generation.request_id


def test_end_of_the_connection_reaches_every_generation_and_the_next_one_reconnects() -> None:
    with answering(break_off_at_b) as stub, Client(stub.url) as client:
        generations = [client.generate(prompt) for prompt in "ab"]
        for generation in generations:
            with pytest.raises(ConnectionLost, match="draining"):
                next(generation)
        assert client.create_session().id == "sess_1"


async def test_end_of_the_connection_reaches_every_generation_async() -> None:
    with answering(break_off_at_b) as stub:
        async with AsyncClient(stub.url) as client:
            generations = [await client.generate(prompt) for prompt in "ab"]
            for generation in generations:
                with pytest.raises(ConnectionLost, match="draining"):
                    await anext(generation)
            assert (await client.create_session()).id == "sess_1"


def test_leaving_a_block_by_an_error_does_not_hide_it_behind_another() -> None:
    with answering(break_off_at_b) as stub, Client(stub.url) as client:
        generation = client.generate("b")
        with pytest.raises(ZeroDivisionError), generation:
            raise ZeroDivisionError


def test_refusal_without_a_name_ends_what_waits() -> None:
    with (
        answering(cannot_read) as stub,
        Client(stub.url) as client,
        pytest.raises(InvalidRequest, match="not JSON"),
    ):
        client.create_session()


def test_append_that_is_cancelled_is_an_error() -> None:
    def cancel(connection: ServerConnection, message: Message) -> None:
        connection.send(finished(message, "cancelled"))

    with answering(cancel) as stub, Client(stub.url) as client, pytest.raises(Cancelled):
        client.session("sess_1").append("x")


def test_request_that_fails_in_the_server_is_an_error() -> None:
    def fail(connection: ServerConnection, message: Message) -> None:
        connection.send(finished(message, "error", error="the row was not finite"))

    with (
        answering(fail) as stub,
        Client(stub.url) as client,
        pytest.raises(InternalServerError, match="not finite"),
    ):
        client.generate("a").text()


def test_unread_generation_blocks_neither_the_server_nor_other_requests() -> None:
    flooded = threading.Event()

    def flood_and_tell(connection: ServerConnection, message: Message) -> None:
        flood(connection, message)
        flooded.set()

    with answering(flood_and_tell) as stub, Client(stub.url, timeout_s=60) as client:
        unread = client.generate("a")
        assert flooded.wait(timeout=60), "the server is still stuck in sending"
        assert client.create_session().id == "sess_1"
        *tokens, last = unread
        assert len(tokens) == NUM_FLOOD
        assert last is unread.finished


async def test_unread_generation_blocks_no_other_async() -> None:
    with answering(flood) as stub:
        async with AsyncClient(stub.url, timeout_s=60) as client:
            unread = await client.generate("a")
            assert (await client.create_session()).id == "sess_1"
            assert len([event async for event in unread]) == NUM_FLOOD + 1
