"""A generation is read to its end through any number of sockets, each event exactly once."""

from __future__ import annotations

import pytest

from tests.fakes import FakeEngine
from tests.server.api.talk import (
    at_rest,
    create,
    info,
    kept,
    left,
    post,
    resume,
    settled,
    story,
    until,
)
from tests.server.harness import Gate, Running, receive, receive_until, running, send

NUM_EVENTS = 7  # six tokens and the end


def text_of(events: list[dict[str, object]]) -> str:
    return "".join(str(event["text"]) for event in events)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_read", "live"),
    [(num, num % 2 == 0) for num in range(NUM_EVENTS + 1)] + [(3, True), (4, False)],
)
async def test_disconnect_after_any_event_resumes_without_gap_or_repeat(
    num_read: int, live: bool
) -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate)) as server:
        session = await create(server)
        events = []
        async with server.socket() as socket:
            await send(socket, type="generate", request_id="a", session=session, prompt="hi",
                       max_tokens=NUM_EVENTS - 1, seed=0)  # fmt: skip
            await gate.reached()
            if num_read:
                gate.allow(num_read)
            while len(events) < num_read:
                message = await receive(socket)
                if message["type"] != "started":
                    events.append(message)
            if not live:
                gate.open()
                await at_rest(server)
            socket.transport.abort()
        async with server.socket() as socket:
            if live:
                gate.open()
            answer, *rest = await resume(socket, session, num_read, take_over=True)
        assert answer["type"] == "resumed"
        assert [event["request_id"] for event in rest] == ["r"] * len(rest)
        events += rest
        assert [event["seq"] for event in events] == list(range(1, NUM_EVENTS + 1))
        assert [event["type"] for event in events] == ["token"] * 6 + ["finished"]
        assert [event["position"] for event in events] == [2, 3, 4, 5, 6, 7, 8]
        assert text_of(events) == story(2, 6)


async def test_resumed_has_the_session_position(server: Running) -> None:
    session = await kept(server, 3)
    async with server.socket() as socket:
        answer, *events = await resume(socket, session, 1)
    assert answer == {
        "type": "resumed",
        "request_id": "r",
        "session": session,
        "epoch": server.async_engine.epoch_name(0),
        "seq": 1,
        "last_seq": 4,
        "position": 5,
        "busy": False,
    }
    assert [event["seq"] for event in events] == [2, 3, 4]


async def test_resumed_finished_is_what_was_sent_the_first_time(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="r", prompt="hi", max_tokens=3, keep=True)
        _, *first = await receive_until(socket, "finished")
        session = first[-1]["session"]
        _, *again = await resume(socket, session)
    assert again == first


async def test_idle_session_with_nothing_missed_answers_and_frees_the_name(server: Running) -> None:
    session = await kept(server, 3)
    async with server.socket() as socket:
        for _ in range(2):
            (answer,) = await resume(socket, session, 4)
            assert (answer["busy"], answer["seq"], answer["last_seq"]) == (False, 4, 4)
        await send(socket, type="generate", request_id="r", session=session, max_tokens=1)
        assert (await receive_until(socket, "finished"))[-1]["seq"] == 6


async def test_events_of_several_requests_are_one_history(server: Running) -> None:
    session = await kept(server, 3)
    await post(server, session, "append", text="abc")
    await server.generate(session=session, max_tokens=2, seed=0)
    async with server.socket() as socket:
        _, *events = await resume(socket, session)
    assert [event["type"] for event in events] == [*["token"] * 3, "finished"] + (
        ["token"] * 2 + ["finished"]
    )
    assert [event["seq"] for event in events] == list(range(1, 8))


async def test_second_reader_is_refused_and_the_first_one_continues(server: Running) -> None:
    session = await left(server)
    async with server.socket() as one, server.socket() as two:
        await send(one, type="resume", request_id="1", session=session, last_seq=0)
        await receive_until(one, "token")
        (error,) = await resume(two, session)
        assert (error["status"], error["error"]["code"]) == (409, "session_attached")
        await receive_until(one, "token")
        await send(one, type="cancel", request_id="1")
        assert (await receive_until(one, "finished"))[-1]["finish_reason"] == "cancelled"


async def test_replaced_reader_is_notified_and_has_all_earlier_events(server: Running) -> None:
    session = await left(server)
    async with server.socket() as one, server.socket() as two:
        await send(one, type="resume", request_id="1", session=session, last_seq=0)
        await receive_until(one, "token")
        take_over = {"session": session, "last_seq": 0, "take_over": True}
        await send(two, type="resume", request_id="2", **take_over)
        answer = await receive(two)
        before = await receive_until(one, "error")
        assert before[-1]["request_id"] == "1"
        assert (before[-1]["status"], before[-1]["error"]["code"]) == (409, "session_attached")
        seqs = [(await receive(two))["seq"] for _ in range(answer["last_seq"] + 50)]
        assert seqs == list(range(1, len(seqs) + 1))
        await send(one, type="cancel", request_id="1")  # it is no longer its own
        await send(one, type="create", request_id="1")
        assert (await receive(one))["type"] == "created"
        assert (await info(server, session))["busy"]


async def test_cursor_in_the_future_is_a_reset_to_the_present(server: Running) -> None:
    session = await kept(server, 3)
    async with server.socket() as socket:
        (answer,) = await resume(socket, session, 5)
    assert answer["type"] == "reset"
    assert answer["reason"]
    assert (answer["seq"], answer["last_seq"], answer["busy"]) == (4, 4, False)


async def test_cursor_of_another_epoch_is_a_reset(server: Running) -> None:
    session = await kept(server, 3)
    old = (await info(server, session))["epoch"]
    new = (await post(server, session, "rewind", at=2)).json()["epoch"]
    assert old != new
    async with server.socket() as socket:
        assert (await resume(socket, session, 2, epoch=old))[0]["type"] == "reset"
        assert (await resume(socket, session, 2, epoch=new))[0]["type"] == "resumed"


async def test_cursor_of_another_store_is_a_reset_also_where_the_session_is_gone(
    server: Running,
) -> None:
    session, epoch = await kept(server, 3), "0" * 16 + "-0"
    async with server.socket() as socket:
        (known,) = await resume(socket, session, 2, epoch=epoch)
        (gone,) = await resume(socket, "sess_gone", 2, epoch=epoch)
        assert (known["type"], known["seq"]) == ("reset", 4)
        assert (gone["type"], gone["seq"], gone["position"]) == ("reset", 0, 0)
        (missing,) = await resume(socket, "sess_gone", 2)
        assert (missing["type"], missing["status"]) == ("error", 404)


async def test_reset_of_a_running_session_continues_with_new_events(server: Running) -> None:
    session = await left(server)
    async with server.socket() as socket:
        await send(
            socket, type="resume", request_id="r", session=session, last_seq=10**9, epoch="x-0"
        )
        answer, token = await receive(socket), await receive(socket)
        assert (answer["type"], answer["busy"]) == ("reset", True)
        assert (token["type"], token["seq"]) == ("token", answer["seq"] + 1)


async def test_disconnect_detaches_and_the_generation_completes(server: Running) -> None:
    session = await left(server, 300)
    await at_rest(server)
    found = await info(server, session)
    assert (found["busy"], found["seq"], found["position"]) == (False, 301, 302)


async def test_disconnect_of_an_http_stream_detaches_too(server: Running) -> None:
    session = await create(server)
    body = {"session": session, "prompt": "hi", "max_tokens": 3000, "stream": True, "seed": 0}
    async with server.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
    await server.async_engine.drained()
    await at_rest(server)
    assert (await info(server, session))["seq"] == 3001


async def test_unread_generation_parks_at_the_limit_and_resumes_when_read() -> None:
    num_tokens = 5000
    async with running(FakeEngine(max_detached_tokens=20)) as server:
        session = await left(server)
        await until(server, lambda stats: stats.num_parked == 1)
        parked = await info(server, session)
        assert (parked["busy"], parked["parked"]) == (True, True)
        assert await settled(server) == await settled(server)
        async with server.socket() as socket:
            await send(socket, type="resume", request_id="r", session=session, last_seq=0)
            answer, events = await receive(socket), [await receive(socket)]
            assert answer["last_seq"] == parked["seq"]
            while events[-1]["seq"] < parked["seq"] + num_tokens:
                events.append(await receive(socket))
            await send(socket, type="cancel", request_id="r")
            await receive_until(socket, "finished")
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert text_of(events[:num_tokens]) == story(2, num_tokens)


async def test_detach_answers_and_leaves_the_generation_running(server: Running) -> None:
    session = await create(server)
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="a", session=session, prompt="hi",
                   max_tokens=10**6, seed=0)  # fmt: skip
        await receive_until(socket, "token")
        await send(socket, type="detach", request_id="a")
        last = (await receive_until(socket, "detached"))[-1]
        assert last == {"type": "detached", "request_id": "a"}
        await send(socket, type="create", request_id="b")
        assert (await receive(socket))["request_id"] == "b"  # and no more of a
        assert (await info(server, session))["busy"]


async def test_detached_generation_can_be_resumed_under_its_old_name(server: Running) -> None:
    session = await create(server)
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="r", session=session, prompt="hi",
                   max_tokens=3000, seed=0)  # fmt: skip
        await receive_until(socket, "token")
        await send(socket, type="detach", request_id="r")
        await receive_until(socket, "detached")
        answer, *events = await resume(socket, session)
    assert answer["type"] == "resumed"
    assert [event["seq"] for event in events] == list(range(1, 3002))


async def test_immediate_detach_after_a_resume_leaves_the_session_running(
    server: Running,
) -> None:
    session = await left(server)
    async with server.socket() as socket:
        for _ in range(20):
            await send(socket, type="resume", request_id="r", session=session, last_seq=0)
            await send(socket, type="detach", request_id="r")
            await receive_until(socket, "detached")
        await send(socket, type="create", request_id="b")
        assert (await receive(socket))["type"] == "created"
        await server.async_engine.drained()
        await send(socket, type="resume", request_id="r", session=session, last_seq=0)
        assert (await receive(socket))["type"] == "resumed"
    await post(server, session, "cancel")


async def test_resume_that_is_cancelled_at_once_ends_what_runs(server: Running) -> None:
    session = await left(server)
    async with server.socket() as socket:
        await send(socket, type="resume", request_id="r", session=session, last_seq=0)
        await send(socket, type="cancel", request_id="r")
        last = (await receive_until(socket, "finished"))[-1]
    assert last["finish_reason"] == "cancelled"


async def test_detach_of_an_unkept_request_cancels_it(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="a", prompt="hi", max_tokens=10**6)
        await receive_until(socket, "token")
        await send(socket, type="detach", request_id="a")
        await receive_until(socket, "detached")
        assert (await settled(server)).held_slots == 0


async def test_detach_of_what_is_over_has_no_answer(server: Running) -> None:
    async with server.socket() as socket:
        await send(socket, type="detach", request_id="nobody")
        await send(socket, type="create", request_id="a")
        assert (await receive(socket))["type"] == "created"


@pytest.mark.slow
@pytest.mark.parametrize("max_queued_events", [16, 2048])
async def test_many_sessions_are_resumed_at_once_over_one_socket(max_queued_events: int) -> None:
    async with running(FakeEngine(), max_queued_events=max_queued_events) as server:
        sessions = [await kept(server, 600) for _ in range(16)]
        async with server.socket() as socket:
            for session in sessions:
                await send(socket, type="resume", request_id=session, session=session, last_seq=0)
            seqs: dict[str, list[int]] = {session: [] for session in sessions}
            while any(len(found) < 602 for found in seqs.values()):
                message = await receive(socket)
                seqs[message["request_id"]].append(message["seq"])
        assert all(found == list(range(602)) for found in seqs.values())  # resumed has seq 0


async def test_resumed_session_can_be_cancelled_under_its_new_name(server: Running) -> None:
    session = await left(server)
    async with server.socket() as socket:
        await send(socket, type="resume", request_id="new", session=session, last_seq=0)
        await receive_until(socket, "token")
        await send(socket, type="cancel", request_id="new")
        finished = (await receive_until(socket, "finished"))[-1]
    assert (finished["request_id"], finished["finish_reason"]) == ("new", "cancelled")
    assert (await info(server, session))["seq"] == finished["seq"]
