from __future__ import annotations

import logging

import pytest

from tests.server.harness import receive_until, running, send

SECRET = "secret"


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    found = [each for each in caplog.records if each.name == "everstream.access"]
    assert all(vars(each)["client"] == "127.0.0.1" for each in found)
    assert all(vars(each)["duration_s"] >= 0 for each in found)
    return [tuple(vars(each)[name] for name in ("method", "path", "status")) for each in found]


async def test_each_request_is_one_line_without_what_it_carried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "everstream.access")
    async with running(access_log=True, api_keys=(SECRET,)) as server:
        key = {"authorization": f"Bearer {SECRET}"}
        await server.http.get("/ready")
        await server.http.get(f"/v1/models?key={SECRET}")
        await server.http.get("/v1/models", headers=key)
        body = {"prompt": SECRET, "max_tokens": 2, "stream": True}
        await server.http.post("/v1/completions", json=body, headers=key)
        async with server.socket(additional_headers=key) as socket:
            await send(socket, type="generate", request_id="a", prompt=SECRET, max_tokens=1)
            await receive_until(socket, "finished")
    assert lines(caplog)[1:] == [
        ("GET", "/v1/models", 401),
        ("GET", "/v1/models", 200),
        ("POST", "/v1/completions", 200),
        ("WEBSOCKET", "/v1/stream", 101),
    ]
    ours = [vars(each) for each in caplog.records if each.name.startswith("everstream")]
    assert SECRET not in repr(ours)  # the client, which is in this process, logs what it sends


async def test_access_log_is_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "everstream.access")
    async with running() as server:
        await server.http.get("/v1/models")
    assert lines(caplog) == []


async def test_refused_request_and_long_path_have_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "everstream.access")
    async with running(access_log=True) as server:
        await server.http.get("/" + "a" * 9000)
        await server.exchange(b"GET /x HTTP/1.1\r\nhost: a b\r\nconnection: close\r\n\r\n")
    assert lines(caplog) == [("GET", "/" + "a" * 199, 404), ("GET", "/x", 400)]
