"""Every request that has ended is counted by its reason, whether or not it had a reader then."""

from __future__ import annotations

from tests.server.api.talk import at_rest, create, left
from tests.server.harness import Running, receive_until, send

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
