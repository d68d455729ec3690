"""The Caddyfile of proxy.md: Caddy in front of real servers."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from benchmarks import sse
from tests.deploy.tls_proxy import NAME, TlsProxy, client_of, make_certificate, wait_for
from tests.docs.blocks import blocks_of
from tests.docs.pages import DOCS
from tests.reliability.servers import FAKE, LOCAL, STUCK_S, ServerProcess
from tests.requirements import needs_program, program
from tests.reserved_port import ReservedPort
from tests.waiting import eventually

PROGRAM = program("caddy")
pytestmark = needs_program("caddy")

SETTINGS = {"EVERSTREAM_KEEP_ALIVE_S": "75", "EVERSTREAM_TRUSTED_PROXIES": "127.0.0.1"}
ENDLESS = {"prompt": "Once", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


@contextmanager
def caddy_before(folder: Path, one: int, two: int) -> Iterator[TlsProxy]:
    """Runs Caddy before two servers; only addresses and the certificate differ from the page."""
    (block,) = (
        block for block in blocks_of(DOCS / "operate/proxy.md") if block.language == "caddyfile"
    )
    certificate, key = make_certificate(folder)
    with ReservedPort() as reserved:
        text = block.text
        for shown, there in {
            f"{NAME} {{": f"https://{LOCAL}:{reserved.number} {{\n    tls {certificate} {key}",
            "127.0.0.1:8001": f"{LOCAL}:{one}",
            "127.0.0.1:8002": f"{LOCAL}:{two}",
        }.items():
            assert text.count(shown) == 1, shown
            text = text.replace(shown, there)
        file = folder / "Caddyfile"
        file.write_text(f"{{\n    admin off\n    auto_https disable_redirects\n}}\n{text}\n")
        homes = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(folder))
        assert PROGRAM is not None
        process = subprocess.Popen(
            [PROGRAM, "run", "--config", file, "--adapter", "caddyfile"],
            env={**os.environ, **homes},
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(reserved.number, process)
            trust = ssl.create_default_context(cafile=str(certificate))
            yield TlsProxy(reserved.number, trust)
        finally:
            process.terminate()
            process.wait(STUCK_S)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with (
        ServerProcess("--step-ms", 1, program=FAKE, environment=SETTINGS) as one,
        ServerProcess("--step-ms", 1, program=FAKE, environment=SETTINGS) as two,
    ):
        yield one, two


@pytest.fixture(scope="module")
def caddy(
    servers: tuple[ServerProcess, ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TlsProxy]:
    one, two = servers
    with caddy_before(tmp_path_factory.mktemp("caddy"), one.port, two.port) as started:
        yield started


async def test_stream_arrives_while_it_runs_and_ends_when_the_client_leaves(
    caddy: TlsProxy, servers: tuple[ServerProcess, ServerProcess]
) -> None:
    async with client_of(caddy) as client:
        async with client.stream("POST", "/v1/completions", json=ENDLESS) as answer:
            events = sse.read(answer.aiter_bytes())
            first = [await anext(events) for _ in range(5)]
        assert all(event.value["object"] == "text_completion" for event in first)
        running = ("everstream_running_requests",)
        await eventually(lambda: all(server.gauges()[running] == 0 for server in servers))


async def test_both_sockets_are_upgraded_for_pages_of_the_same_name(caddy: TlsProxy) -> None:
    options: dict[str, Any] = {"ssl": caddy.trust, "origin": caddy.url, "open_timeout": STUCK_S}
    async with connect(f"{caddy.socket_url}/v1/stream", **options) as socket:
        await socket.send(json.dumps({"type": "create", "request_id": "a"}))
        assert json.loads(await socket.recv())["type"] == "created"
    async with connect(f"{caddy.socket_url}/v1/responses", **options) as socket:
        await socket.send(json.dumps({"type": "response.create", "input": "Once"}))
        assert json.loads(await socket.recv())["type"] == "response.created"


async def test_server_sees_the_clients_address_and_large_bodies(tmp_path: Path) -> None:
    with (
        ServerProcess("--access-log", environment=SETTINGS) as server,
        caddy_before(tmp_path, server.port, server.port) as caddy,
    ):
        async with client_of(caddy, "127.0.0.9") as client:
            invented = {"x-forwarded-for": "192.0.2.66"}
            assert (await client.get("/v1/models?of=client", headers=invented)).status_code == 200
            head = {"content-type": "application/vnd.everstream.session"}
            body = bytes(1_300_000)
            answer = await client.post("/v1/sessions/import", content=body, headers=head)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "import_refused")
        await eventually(lambda: "client=127.0.0.9" in server.log())
        assert "192.0.2.66" not in server.log()


async def test_server_that_is_not_there_is_passed_over(tmp_path: Path) -> None:
    body = {"prompt": "Once", "max_tokens": 2}
    with (
        ReservedPort() as unused,
        ServerProcess(program=FAKE, environment=SETTINGS) as server,
        caddy_before(tmp_path, unused.number, server.port) as caddy,
    ):
        async with client_of(caddy) as client:
            answers = [await client.post("/v1/completions", json=body) for _ in range(10)]
    assert {answer.status_code for answer in answers} == {httpx.codes.OK}
