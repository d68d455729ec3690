"""`deploy/nginx/nginx.conf`, which proxy.md explains: nginx in front of real servers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from benchmarks import sse
from tests.deploy.nginx import nginx_before
from tests.deploy.tls_proxy import NAME, TlsProxy, client_of
from tests.reliability.servers import FAKE, STUCK_S, ServerProcess
from tests.requirements import needs_program
from tests.waiting import eventually

pytestmark = needs_program("nginx")

#: As the page starts servers.
SETTINGS = {"EVERSTREAM_KEEP_ALIVE_S": "75", "EVERSTREAM_TRUSTED_PROXIES": "127.0.0.1"}
ENDLESS = {"prompt": "Once", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--store", tmp_path_factory.mktemp("store"), "--access-log", "--allow-host", NAME)
    with ServerProcess(*flags, environment=SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def nginx(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsProxy]:
    with nginx_before(tmp_path_factory.mktemp("nginx"), server.port) as started:
        yield started


async def test_page_and_its_files_arrive(nginx: TlsProxy) -> None:
    async with client_of(nginx) as client:
        page = await client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        (script, *_) = re.findall(r'src="(/?static/[^"]+)"', page.text)
        assert (await client.get(script)).status_code == 200


async def test_tokens_arrive_while_the_stream_runs(nginx: TlsProxy, server: ServerProcess) -> None:
    """It has no end of its own, so a proxy that collected it would have nothing to send."""
    async with client_of(nginx) as client:
        async with client.stream("POST", "/v1/completions", json=ENDLESS) as answer:
            events = sse.read(answer.aiter_bytes())
            first = [await anext(events) for _ in range(5)]
        assert all(event.value["object"] == "text_completion" for event in first)
        await eventually(lambda: server.gauges()["everstream_running_requests",] == 0)


async def test_both_sockets_are_upgraded(nginx: TlsProxy) -> None:
    # It always reads, so that closing it does not wait for what nobody takes.
    reading = {"max_queue": None, "open_timeout": STUCK_S}
    options: dict[str, Any] = {"ssl": nginx.trust, "origin": nginx.url, **reading}
    async with connect(f"{nginx.socket_url}/v1/stream", **options) as socket:
        message = {"type": "generate", "request_id": "a", "prompt": "Once", "max_tokens": 3}
        await socket.send(json.dumps(message))
        types = []
        while "finished" not in types:
            types.append(json.loads(await socket.recv())["type"])
        assert types[0] == "started"
    async with connect(f"{nginx.socket_url}/v1/responses", **options) as socket:
        await socket.send(json.dumps({"type": "response.create", "input": "Once"}))
        assert json.loads(await socket.recv())["type"] == "response.created"


async def test_import_over_a_megabyte_reaches_the_server(nginx: TlsProxy) -> None:
    async with client_of(nginx) as client:
        made = (await client.post("/v1/sessions", json={})).json()
        exported = await client.get(f"/v1/sessions/{made['session']}/export")
        head = {"content-type": "application/vnd.everstream.session"}
        taken = await client.post("/v1/sessions/import", content=exported.content, headers=head)
        assert taken.status_code == 200, taken.text
        padded = exported.content + bytes(1_300_000 - len(exported.content))
        refused = await client.post("/v1/sessions/import", content=padded, headers=head)
        # By the server, and not with 413 by nginx.
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "import_refused")


async def test_address_of_the_client_is_in_the_servers_log(
    nginx: TlsProxy, server: ServerProcess
) -> None:
    async with client_of(nginx, "127.0.0.9") as client:
        invented = {"x-forwarded-for": "192.0.2.66"}
        assert (await client.get("/v1/models?of=client", headers=invented)).status_code == 200
    await eventually(lambda: "client=127.0.0.9" in server.log())
    assert "192.0.2.66" not in server.log()


async def test_host_and_origin_are_those_of_the_client(
    nginx: TlsProxy, server: ServerProcess
) -> None:
    body = {"prompt": "Once", "max_tokens": 1}
    async with client_of(nginx) as client:
        for host, origin, status in (
            (NAME, f"https://{NAME}", 200),
            (f"{NAME}:8443", f"https://{NAME}:8443", 200),
            (NAME, "https://evil.example", 403),
            ("evil.example", "https://evil.example", 403),
        ):
            headers = {"host": host, "origin": origin}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status, answer.text
    log = server.log()
    assert f"origin 'https://evil.example' refused, Host is '{NAME}'" in log
    assert "Host 'evil.example' refused" in log
    assert log.count("a proxy forwards requests to this server, which has no keys") == 1


@pytest.mark.parametrize("heartbeat_s", ["0.25", "0"])
async def test_silence_beyond_the_read_timeout_needs_heartbeats(
    heartbeat_s: str, tmp_path: Path
) -> None:
    """A request waits for its turn, and a socket is idle, for longer than nginx waits for data."""
    timeout_s = 4
    environment = {**SETTINGS, "EVERSTREAM_HEARTBEAT_S": heartbeat_s}
    flags = ("--step-ms", 100, "--max-running", 1)
    with (
        ServerProcess(*flags, program=FAKE, environment=environment) as server,
        nginx_before(tmp_path, server.port, proxy_read_timeout=f"{timeout_s}s") as nginx,
    ):
        async with (
            client_of(nginx) as client,
            httpx.AsyncClient(timeout=STUCK_S) as direct,
            connect(f"{nginx.socket_url}/v1/stream", ssl=nginx.trust) as socket,
        ):
            url = f"{server.url}/v1/completions"
            async with direct.stream("POST", url, json=ENDLESS) as first:
                running = first.aiter_lines()
                await anext(running)
                body = {"prompt": "Once", "max_tokens": 2, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    if heartbeat_s == "0":
                        assert answer.status_code == 504
                        return
                    lines = (line async for line in answer.aiter_lines() if line)
                    for _ in range(int((timeout_s + 1) / float(heartbeat_s))):
                        assert await anext(lines) == ": keep-alive"
                    await first.aclose()
                    rest = [line async for line in lines if not line.startswith(":")]
            await socket.send(json.dumps({"type": "create", "request_id": "a"}))
            assert json.loads(await socket.recv())["type"] == "created"
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 4


async def test_rolling_restart_of_two_servers_is_without_an_error(tmp_path: Path) -> None:
    with (
        ServerProcess("--step-ms", 1, program=FAKE, environment=SETTINGS) as one,
        ServerProcess("--step-ms", 1, program=FAKE, environment=SETTINGS) as two,
        nginx_before(tmp_path, one.port, two.port) as nginx,
    ):
        statuses: list[int] = []
        ended = asyncio.Event()

        async def ask() -> None:
            async with client_of(nginx) as client:
                while not ended.is_set():
                    body = {"prompt": "Once", "max_tokens": 2}
                    answer = await client.post("/v1/completions", json=body)
                    statuses.append(answer.status_code)

        async with asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(ask())
            for server in (one, two):
                num_before = len(statuses)
                assert await asyncio.to_thread(server.stop) == 0
                await eventually(lambda: len(statuses) >= num_before + 20)  # noqa: B023
                await asyncio.to_thread(server.start)
                # nginx uses it again, so that the other one may stop.
                await eventually(lambda: num_answered(server) > 0)  # noqa: B023
            ended.set()
        assert set(statuses) == {200}


def num_answered(server: ServerProcess) -> float:
    return sum(
        value
        for (name, *_), value in server.gauges().items()
        if name == "everstream_requests_total"
    )
