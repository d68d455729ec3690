"""Sessions are copied, cut back, listed and given up, over HTTP and over the socket."""

from __future__ import annotations

from tests.fakes import STATE_BYTES, FakeEngine, score_of
from tests.server.api.talk import create, info, kept, left, post, story
from tests.server.harness import Running, receive, receive_until, running, send


async def text(server: Running, session: str, max_tokens: int = 8, seed: int = 0) -> str:
    answer = await server.generate(session=session, max_tokens=max_tokens, seed=seed)
    found: str = answer.json()["choices"][0]["text"]
    return found


async def test_forks_continue_independently_from_the_present(server: Running) -> None:
    session = await kept(server, 4)
    answer = (await post(server, session, "fork", n=3)).json()
    forks = answer.pop("sessions")
    assert answer == {
        "session": session,
        "epoch": server.async_engine.epoch_name(0),
        "position": 6,
    }
    assert len({session, *forks}) == 4
    assert [await text(server, fork, seed=n) for n, fork in enumerate(forks)] == [
        story(6, 8, n) for n in range(3)
    ]
    assert (await info(server, session))["position"] == 6
    await server.http.delete(f"/v1/sessions/{session}")
    assert await text(server, forks[0]) == story(14, 8)


async def test_fork_without_a_body_is_one_copy(server: Running) -> None:
    session = await kept(server, 4)
    answer = await server.http.post(f"/v1/sessions/{session}/fork")
    (fork,) = answer.json()["sessions"]
    found = await info(server, fork)
    assert (found["position"], found["seq"], found["busy"]) == (6, 0, False)


async def test_fork_in_the_past_is_the_session_as_it_was(server: Running) -> None:
    session = await kept(server, 10)
    for at in (0, 1, 2, 3, 7, 12):
        answer = (await post(server, session, "fork", at=at)).json()
        assert answer["position"] == at
        (fork,) = answer["sessions"]
        if at:
            assert await text(server, fork, 5) == story(at, 5)
    assert (await info(server, session))["position"] == 12


async def test_fork_of_a_running_session_does_not_stop_it(server: Running) -> None:
    session = await left(server)
    (fork,) = (await post(server, session, "fork")).json()["sessions"]
    copy = await info(server, fork)
    assert not copy["busy"]
    assert (await info(server, session))["busy"]
    assert await text(server, fork, 5) == story(copy["position"], 5)
    await post(server, session, "cancel")


async def test_too_many_forks_create_none() -> None:
    async with running(FakeEngine(max_sessions=4)) as server:
        session = await kept(server, 4)
        answer = await post(server, session, "fork", n=4)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "capacity_exhausted")
        assert (await server.stats()).num_sessions == 1
        assert (await post(server, session, "fork", n=3)).status_code == 200


async def test_rewind_cuts_the_text_and_begins_a_new_epoch(server: Running) -> None:
    session = await kept(server, 10)
    answer = (await post(server, session, "rewind", at=5)).json()
    assert answer.pop("idle_s") >= 0
    assert answer == {
        "session": session,
        "model": "fake",
        "epoch": server.async_engine.epoch_name(1),
        "position": 5,
        "seq": 11,
        "busy": False,
        "parked": False,
        "state_bytes": STATE_BYTES,
    }
    assert await text(server, session, 5) == story(5, 5)
    assert (await info(server, session))["seq"] == 17


async def test_rewind_of_a_running_session_is_a_409(server: Running) -> None:
    session = await left(server)
    answer = await post(server, session, "rewind", at=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
    await post(server, session, "cancel")
    assert (await post(server, session, "rewind", at=1)).status_code == 200


async def test_socket_forks_and_rewinds(server: Running) -> None:
    session, epoch_name = await kept(server, 4), server.async_engine.epoch_name
    async with server.socket() as socket:
        await send(socket, type="fork", request_id="f", session=session, n=2, at=3)
        forked = await receive(socket)
        forks = forked.pop("sessions")
        assert forked == {
            "type": "forked",
            "request_id": "f",
            "session": session,
            "epoch": epoch_name(0),
            "position": 3,
        }
        assert len({session, *forks}) == 3
        await send(socket, type="rewind", request_id="w", session=session, at=2)
        assert await receive(socket) == {
            "type": "rewound",
            "request_id": "w",
            "session": session,
            "epoch": epoch_name(1),
            "seq": 5,
            "position": 2,
        }
        await send(socket, type="generate", request_id="g", session=session, max_tokens=2, seed=0)
        started, *_, finished = await receive_until(socket, "finished")
        assert (started["epoch"], started["position"]) == (epoch_name(1), 2)
        assert (finished["seq"], finished["position"]) == (8, 4)


async def test_methods_on_an_unknown_session_are_404(server: Running) -> None:
    for verb, body in (("fork", {}), ("rewind", {"at": 0}), ("cancel", {})):
        answer = await post(server, "sess_none", verb, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    async with server.socket() as socket:
        for more in ({"type": "fork"}, {"type": "rewind", "at": 0}):
            await send(socket, request_id="a", session="sess_none", **more)
            assert (await receive(socket))["status"] == 404


async def test_list_has_every_session_with_its_figures_page_by_page(server: Running) -> None:
    sessions = sorted([await kept(server, n) for n in (1, 2, 3)])
    running_one = await left(server)
    sessions = sorted([*sessions, running_one])
    whole = (await server.http.get("/v1/sessions")).json()
    assert (whole["object"], whole["has_more"]) == ("list", False)
    assert [one["session"] for one in whole["data"]] == sessions
    for one in whole["data"]:
        assert one.keys() == {
            *("session", "model", "epoch", "position", "seq", "busy", "stored_bytes")
        }
        assert one["busy"] == (one["session"] == running_one)
        assert one["stored_bytes"] > 0
    first = whole["data"][0]
    found = await info(server, first["session"])
    assert {name: found[name] for name in ("epoch", "position", "seq")} == {
        name: first[name] for name in ("epoch", "position", "seq")
    }
    names: list[str] = []
    for more in (True, False):
        after = names[-1] if names else ""
        params = {"limit": 2, "after": after}
        page = (await server.http.get("/v1/sessions", params=params)).json()
        assert page["has_more"] == more
        names += [one["session"] for one in page["data"]]
    assert names == sessions
    await post(server, running_one, "cancel")


async def test_list_of_nothing_is_empty(server: Running) -> None:
    assert (await server.http.get("/v1/sessions")).json() == {
        "object": "list",
        "data": [],
        "has_more": False,
    }


async def test_sessions_of_others_are_not_in_the_list() -> None:
    async with running(api_keys=("one", "two")) as server:
        for key, num in (("one", 1), ("two", 0)):
            server.http.headers["authorization"] = f"Bearer {key}"
            if num:
                await create(server)
            assert len((await server.http.get("/v1/sessions")).json()["data"]) == num


async def test_append_with_logprobs_returns_the_logprob_of_each_token(server: Running) -> None:
    session = await create(server)
    first = (await post(server, session, "append", text="abc", logprobs=True)).json()
    assert first["logprobs"] == [score_of(ord(c)) for c in "bc"]  # the first has none
    second = (await post(server, session, "append", text="de", logprobs=True)).json()
    assert second["logprobs"] == [score_of(ord(c)) for c in "de"]
    plain = (await post(server, session, "append", text="f", logprobs=False)).json()
    assert "logprobs" not in plain
    async with server.socket() as socket:
        await send(socket, type="append", request_id="a", session=session, text="gh", logprobs=True)
        assert await receive(socket) == {
            "type": "appended",
            "request_id": "a",
            "session": session,
            "position": 8,
            "usage": {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2},
            "logprobs": [score_of(ord(c)) for c in "gh"],
        }
