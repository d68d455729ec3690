from __future__ import annotations

import json

from server.engine.sampling import with_defaults
from tests.fakes import STATE_BYTES, FakeEngine
from tests.server.harness import Gate, Recorder, Running, receive, receive_until, running, send


async def test_generate_answers_started_tokens_finished(server: Running) -> None:
    async with server.socket() as socket:
        await send(
            socket, type="generate", request_id="b", prompt="hi", max_tokens=3, seed=0, keep=True
        )
        started, *tokens, finished = await receive_until(socket, "finished")
    session = started["session"]
    assert started == {
        "type": "started",
        "request_id": "b",
        "session": session,
        "epoch": server.async_engine.epoch_name(0),
        "seq": 0,
        "position": 0,
        "seed": 0,
    }
    assert [token["seq"] for token in tokens] == [1, 2, 3]
    assert tokens[0] == {
        "type": "token",
        "request_id": "b",
        "seq": 1,
        "position": 2,
        "token_id": ord("c"),
        "text": "c",
    }
    assert finished == {
        "type": "finished",
        "request_id": "b",
        "session": session,
        "seq": 4,
        "position": 5,
        "text": "",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }


async def test_penalties_and_filters_reach_the_engine() -> None:
    engine = Recorder()
    given = {"presence_penalty": 2, "frequency_penalty": -0.5, "top_n_sigma": 1.5}
    async with running(engine) as server, server.socket() as socket:
        await send(
            socket, type="generate", request_id="a", prompt="hi", max_tokens=1, seed=0, **given
        )
        await receive_until(socket, "finished")
    assert engine.sampling == [with_defaults(max_tokens=1, seed=0, **given)]


async def test_unkept_session_ends_with_its_request(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="b", prompt="hi", max_tokens=1)
        finished = (await receive_until(socket, "finished"))[-1]
        assert finished["session"] is None
        assert (await server.stats()).held_slots == 0


async def test_create_append_generate_delete(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="create", request_id="a")
        created = await receive(socket)
        session = created["session"]
        assert created == {
            "type": "created",
            "request_id": "a",
            "session": session,
            "epoch": server.async_engine.epoch_name(0),
            "position": 0,
            "state_bytes": STATE_BYTES,
        }
        await send(socket, type="append", request_id="c", session=session, text="hello")
        assert await receive(socket) == {
            "type": "appended",
            "request_id": "c",
            "session": session,
            "position": 5,
            "usage": {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5},
        }
        await send(socket, type="generate", request_id="b", session=session, max_tokens=2)
        assert (await receive_until(socket, "finished"))[-1]["position"] == 7
        await send(socket, type="delete", request_id="d", session=session)
        assert await receive(socket) == {"type": "deleted", "request_id": "d", "session": session}
        await send(socket, type="delete", request_id="e", session=session)
        assert await receive(socket) == {
            "type": "error",
            "request_id": "e",
            "status": 404,
            "error": {
                "message": "no such session",
                "type": "invalid_request_error",
                "param": "session",
                "code": "session_not_found",
            },
        }


async def test_seq_continues_in_a_continued_session(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="a", prompt="hi", max_tokens=2, keep=True)
        session = (await receive_until(socket, "finished"))[-1]["session"]
        await send(socket, type="generate", request_id="a", session=session, max_tokens=2)
        messages = await receive_until(socket, "finished")
    assert [message["seq"] for message in messages[1:]] == [4, 5, 6]


async def test_several_generations_run_at_once_each_in_its_order(server: Running) -> None:
    async with server.socket() as socket:
        for name in ("a", "b", "c"):
            await send(socket, type="generate", request_id=name, prompt="hi", max_tokens=50, seed=0)
        messages = []
        while sum(message["type"] == "finished" for message in messages) < 3:
            messages.append(await receive(socket))
    texts = set()
    for name in ("a", "b", "c"):
        own = [message for message in messages if message["request_id"] == name][1:]
        assert [message["seq"] for message in own] == list(range(1, 52))
        texts.add("".join(message["text"] for message in own))
    assert len(texts) == 1


async def test_cancel_ends_a_generation_and_frees_its_slot(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="a", prompt="hi", max_tokens=10**6)
        await receive_until(socket, "token")
        await send(socket, type="cancel", request_id="a")
        finished = (await receive_until(socket, "finished"))[-1]
        assert finished["finish_reason"] == "cancelled"
        assert (await server.stats()).held_slots == 0


async def test_cancel_of_what_is_over_has_no_answer(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="cancel", request_id="nobody")
        await send(socket, type="create", request_id="a")
        assert (await receive(socket))["type"] == "created"


async def test_request_id_can_be_used_again_only_when_it_is_over(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="a", prompt="hi", max_tokens=10**6)
        await receive_until(socket, "token")
        await send(socket, type="generate", request_id="a", prompt="hi")
        error = (await receive_until(socket, "error"))[-1]
        assert (error["status"], error["error"]["param"]) == (400, "request_id")
        await send(socket, type="cancel", request_id="a")
        await receive_until(socket, "finished")
        await send(socket, type="generate", request_id="a", prompt="hi", max_tokens=1)
        await receive_until(socket, "finished")


async def test_two_sockets_may_use_the_same_request_id(server: Running) -> None:
    async with server.socket() as one, server.socket() as two:
        for socket in (one, two):
            await send(socket, type="generate", request_id="a", prompt="hi", max_tokens=100)
        for socket in (one, two):
            assert (await receive_until(socket, "finished"))[-1]["finish_reason"] == "length"


async def test_requests_of_a_socket_are_bounded() -> None:
    async with running(max_socket_requests=2) as server, server.socket() as socket:
        for name in ("a", "b", "c"):
            await send(socket, type="generate", request_id=name, prompt="hi", max_tokens=10**6)
        error = (await receive_until(socket, "error"))[-1]
        assert (error["request_id"], error["status"]) == ("c", 429)
        assert error["error"]["code"] == "queue_full"


async def test_failed_request_finishes_with_error_and_others_continue(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="good", prompt="hi", max_tokens=10**6)
        await receive_until(socket, "token")
        await send(socket, type="generate", request_id="bad", prompt="<fail>")
        finished = (await receive_until(socket, "finished"))[-1]
        assert finished["request_id"] == "bad"
        assert finished["finish_reason"] == "error"
        assert finished["error"] == "the model's output is not finite"
        assert (await receive(socket))["type"] == "token"


async def test_texts_of_every_length_survive_the_framing(server: Running) -> None:
    """Lengths around RFC 6455's 125 and 65,535, where the header changes."""
    async with server.socket() as socket:
        for length in (1, 40, 60, 61, 62, 63, 64):
            await send(socket, type="create", request_id="r" * length)
            assert (await receive(socket))["request_id"] == "r" * length
            session = (await server.http.post("/v1/sessions")).json()["session"]
            await send(socket, type="delete", request_id="é" * length, session=session)
            assert (await receive(socket))["request_id"] == "é" * length


async def test_engine_crash_closes_with_1011() -> None:
    async with running() as server, server.socket() as socket:
        await send(socket, type="generate", request_id="a", prompt="<crash>")
        await socket.wait_closed()
        assert socket.close_code in (1011, 1012)
        await server.done
        assert server.server.exit_code == 1


async def test_started_is_sent_before_the_first_step_ends() -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate)) as server, server.socket() as socket:
        await send(socket, type="generate", request_id="a", prompt="hi", max_tokens=5)
        gate.allow(1)
        assert json.loads(await socket.recv())["type"] == "started"
        gate.open()
        await receive_until(socket, "finished")
