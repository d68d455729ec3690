from __future__ import annotations

import asyncio

from tests.fakes import MODEL, STATE_BYTES, FakeEngine
from tests.server.api.talk import at_rest, create, left
from tests.server.harness import Gate, Running, receive_until, running, send


async def test_create_gives_an_empty_kept_session(server: Running) -> None:
    response = await server.http.post("/v1/sessions", json={})
    assert response.status_code == 200
    assert response.json()["position"] == 0
    assert response.json()["state_bytes"] == STATE_BYTES


async def test_info_shows_position_idle_time_and_bytes(server: Running) -> None:
    session = await create(server)
    await server.generate(prompt="hi", session=session, max_tokens=3)
    info = (await server.http.get(f"/v1/sessions/{session}")).json()
    assert info.pop("idle_s") >= 0
    assert info == {
        "session": session,
        "model": "fake",
        "epoch": server.async_engine.epoch_name(0),
        "position": 5,
        "seq": 4,
        "busy": False,
        "parked": False,
        "state_bytes": STATE_BYTES,
    }


async def test_append_feeds_without_generating(server: Running) -> None:
    session = await create(server)
    response = await server.http.post(f"/v1/sessions/{session}/append", json={"text": "abc"})
    assert response.json() == {
        "session": session,
        "position": 3,
        "usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3},
    }
    response = await server.http.post(f"/v1/sessions/{session}/append", json={"tokens": [1, 2]})
    assert response.json()["position"] == 5


async def test_delete_frees_the_slot_and_the_name(server: Running) -> None:
    session = await create(server)
    response = await server.http.delete(f"/v1/sessions/{session}")
    assert response.json() == {"session": session, "deleted": True}
    assert (await server.stats()).held_slots == 0
    for answer in (
        await server.http.get(f"/v1/sessions/{session}"),
        await server.http.delete(f"/v1/sessions/{session}"),
        await server.http.post(f"/v1/sessions/{session}/append", json={"text": "a"}),
        await server.generate(session=session),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "session_not_found"


async def test_busy_session_refuses_a_second_request_and_delete_cancels_the_first() -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate)) as server:
        session = await create(server)
        first = asyncio.create_task(server.generate(prompt="hi", session=session, max_tokens=10**6))
        await gate.reached()
        gate.open()
        second = await server.generate(prompt="hi", session=session)
        assert second.status_code == 409
        assert second.json()["error"]["code"] == "session_busy"
        await server.http.delete(f"/v1/sessions/{session}")
        assert (await first).json()["choices"][0]["finish_reason"] == "cancelled"
        assert (await server.stats()).held_slots == 0


async def test_models_lists_the_model_with_its_capacity(server: Running) -> None:
    listing = (await server.http.get("/v1/models")).json()
    assert listing["object"] == "list"
    (model,) = listing["data"]
    assert model["id"] == "fake"
    assert model["object"] == "model"
    assert model["everstream"]["state_bytes_per_session"] == STATE_BYTES
    assert model["everstream"]["kv_cache_bytes_per_token"] == MODEL.kv_cache_bytes_per_token
    assert model["everstream"]["max_sessions"] == MODEL.max_sessions


async def test_health_and_ready(server: Running) -> None:
    assert (await server.http.get("/health")).json() == {"status": "ok"}
    assert (await server.http.get("/ready")).json() == {"status": "ready"}
    server.async_engine.begin_drain()
    assert (await server.http.get("/health")).status_code == 200
    assert (await server.http.get("/ready")).status_code == 503


async def test_draining_server_refuses_new_work(server: Running) -> None:
    server.async_engine.begin_drain()
    for response in (await server.generate(prompt="hi"), await server.http.post("/v1/sessions")):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "draining"
        assert "retry-after" in response.headers


async def test_metrics_count_what_happened(server: Running) -> None:
    await server.generate(prompt="hi", max_tokens=3, keep=True)
    async with server.socket():
        text = (await server.http.get("/metrics")).text
    for line in (
        'everstream_ttft_seconds_count{model="fake"} 1.0',
        'everstream_inter_token_seconds_count{model="fake"} 2.0',
        'everstream_tokens_total{kind="prompt",model="fake"} 2.0',
        'everstream_tokens_total{kind="completion",model="fake"} 3.0',
        'everstream_sessions{model="fake"} 1.0',
        'everstream_slots{model="fake",state="held"} 1.0',
        f'everstream_slots{{model="fake",state="total"}} {MODEL.max_sessions}.0',
        'everstream_queue_requests{model="fake"} 0.0',
        'everstream_running_requests{model="fake"} 0.0',
        f'everstream_state_bytes{{model="fake",state="held"}} {STATE_BYTES}.0',
        'everstream_requests_total{finish_reason="length",model="fake"} 1.0',
        "everstream_websockets 1.0",
        'everstream_expired_sessions_total{model="fake"} 0.0',
    ):
        assert line in text.splitlines()


ENDLESS = {"prompt": "hi", "max_tokens": 10**6, "stream": True}


async def num_finished(server: Running, reason: str) -> float:
    text = (await server.http.get("/metrics")).text
    name = f'everstream_requests_total{{finish_reason="{reason}",'
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def test_request_whose_client_leaves_is_cancelled(server: Running) -> None:
    async with server.http.stream("POST", "/v1/completions", json=ENDLESS) as response:
        lines = response.aiter_lines()
        await anext(lines)
    await server.until_slots_are_free()
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="a", prompt="hi", max_tokens=10**6)
        await receive_until(socket, "token")
    await server.until_slots_are_free()
    assert await num_finished(server, "cancelled") == 2


async def test_cancelled_session_without_a_reader_is_counted(server: Running) -> None:
    session = await left(server)
    await server.http.post(f"/v1/sessions/{session}/cancel")
    await at_rest(server)
    assert await num_finished(server, "cancelled") == 1


async def test_generation_that_ends_without_a_reader_is_counted_once(server: Running) -> None:
    session = await create(server)
    async with server.socket() as socket:
        work = {"session": session, "prompt": "hi", "max_tokens": 200}
        await send(socket, type="generate", request_id="a", **work)
        await send(socket, type="detach", request_id="a")
        await receive_until(socket, "detached")
    await at_rest(server)
    async with server.http.stream("GET", f"/v1/sessions/{session}/events") as response:
        await response.aread()
    assert await num_finished(server, "length") == 1
