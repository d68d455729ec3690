"""03: a server without keys: no page can rebind its name to it, and none is opened by mistake."""

from __future__ import annotations

import io
import os
import select
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from server.api.gate import name_of
from tests.forking import Forked
from tests.reliability.servers import LOCAL, STUCK_S, ServerProcess
from tests.server.harness import Running, running

KEY = "the-right-key"
NAMES = ("localhost", "LOCALHOST", "localhost.", "127.0.0.1", "192.0.2.7", "[::1]", "box.lan")
FOREIGN = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "box.lan.example")
FOREIGN_BESIDE = ("xlocalhost", "0x7f000001", "2130706433", "127.1", "box", "lan")


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(allowed_hosts=("box.lan",), allowed_origins=("*",)) as started:
        yield started


@pytest.mark.parametrize(
    ("host", "name"),
    [("A.b:1", "a.b"), ("[::1]:1", "[::1]"), ("[::1]", "[::1]"), ("a.", "a"), ("a.:8", "a")],
)
def test_name_of_a_host(host: str, name: str) -> None:
    assert name_of(host) == name


@pytest.mark.parametrize("host", NAMES)
@pytest.mark.parametrize("port", ["", ":8000"])
async def test_local_host_names_are_answered(server: Running, host: str, port: str) -> None:
    answer = await server.http.get("/v1/models", headers={"host": host + port})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("host", FOREIGN + FOREIGN_BESIDE)
async def test_other_host_names_are_refused_with_any_origin(server: Running, host: str) -> None:
    """The page of a rebound name is its own origin."""
    headers = {"host": f"{host}:8000", "origin": f"http://{host}:8000"}
    for method, path in (
        ("GET", "/"),
        ("GET", "/v1/sessions"),
        ("POST", "/v1/completions"),
        ("GET", "/static/page.css"),
        ("OPTIONS", "/v1/completions"),
        ("GET", "/nothing"),
    ):
        answer = await server.http.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host")
    for path in ("/v1/stream", "/v1/responses"):
        with pytest.raises(InvalidStatus) as refused:
            async with connect(
                f"ws://{host}:8000{path}", host=LOCAL, port=server.port, origin=headers["origin"]
            ):
                pass
        assert refused.value.response.status_code == 403


async def test_probes_answer_to_any_name(server: Running) -> None:
    for path in ("/health", "/ready"):
        answer = await server.http.get(path, headers={"host": "everstream.svc.cluster.local"})
        assert answer.status_code == 200


async def test_star_allows_any_host_name() -> None:
    async with running(allowed_hosts=("*",)) as server:
        answer = await server.http.get("/v1/models", headers={"host": "a.example"})
        assert answer.status_code == 200


async def test_with_keys_the_key_protects_under_any_name() -> None:
    async with running(api_keys=(KEY,)) as server:
        for host in FOREIGN:
            headers = {"host": host, "origin": f"http://{host}"}
            assert (await server.http.post("/v1/sessions", headers=headers)).status_code == 401
            headers["authorization"] = f"Bearer {KEY}"
            assert (await server.http.post("/v1/sessions", headers=headers)).status_code == 200


# The process


@pytest.mark.parametrize(
    "environment",
    [
        {"EVERSTREAM_API_KEY": KEY},
        {"EVERSTREAM_API_KEYS": f"{KEY},other"},
        {"EVERSTREAM_API_KEY": KEY, "EVERSTREAM_API_KEYS": "other"},
        {"EVERSTREAM_ADMIN_KEY": KEY},
    ],
)
def test_key_is_read_by_either_name(environment: Mapping[str, str]) -> None:
    with ServerProcess(environment=environment, host="0.0.0.0") as server:
        url = f"http://{LOCAL}:{server.port}/v1/models"
        assert httpx.get(url, timeout=STUCK_S).status_code == 401
        assert httpx.get(url, headers={"api-key": KEY}, timeout=STUCK_S).status_code == 200
        assert "WARNING" not in server.log()


@contextmanager
def serve(*flags: str, **environment: str) -> Iterator[Forked]:
    words = ("serve", "--port", "0", *flags)
    process = Forked("server.cli.main", words, {**os.environ, **environment}, None)
    with process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def printed_until(process: Forked, word: bytes) -> str:
    """What it prints, up to ``word`` or its end."""
    raw = io.FileIO(process.stdout.fileno(), closefd=False)
    seen = b""
    while word not in seen:
        assert select.select([raw], [], [], 60)[0], seen
        if not (more := raw.read(4096)):
            break
        seen += more
    return seen.decode()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_open_server_prints_and_logs_a_warning(host: str) -> None:
    with serve("--host", host) as process:
        text = printed_until(process, b"and listening on")
    assert "WARNING: this server has no API key" in text
    assert text.index("Open http") < text.index("WARNING: this server")
    assert f"no API key, and listening on {host}" in text


@pytest.mark.parametrize("variable", ["EVERSTREAM_API_KEY", "EVERSTREAM_API_KEYS"])
def test_empty_key_variable_is_refused(variable: str) -> None:
    """It stands for a secret that was not there."""
    for empty in ("", " , "):
        with serve(**{variable: empty}) as process:
            text = printed_until(process, b"Open http")
            assert process.wait(30) == 2
        assert text.startswith(f"everstream: {variable}: is set and empty")


def test_loopback_needs_no_warning() -> None:
    for host in ("127.0.0.1", "localhost"):
        with ServerProcess("--host", host) as server:
            assert server.stop() == 0
            assert "WARNING" not in server.log()
