"""37: a foreign Origin gets 403; keys and prompts are not in the logs."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.reliability.servers import LOCAL, STUCK_S, ServerProcess
from tests.server.harness import Running, receive, running, send

KEY = "the-right-key"
FOREIGN = (
    "https://evil.example",
    "http://127.0.0.1",  # another port is another origin
    "http://127.0.0.1:1",
    "http://localhost:PORT",
    "http://127.0.0.1:PORT.evil.example",
    "http://127.0.0.1:PORT@evil.example",
    "http://evil.example/127.0.0.1:PORT",
    "null",
    "file://",
    "",
)
SAFE_METHODS = {"get", "head", "options", "trace"}


@pytest.fixture(params=[(), (KEY,)], ids=["open", "with keys"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """Without keys above all: there the origin is all that stands before a page's request."""
    async with running(api_keys=request.param) as started:
        yield started


def headers(server: Running, origin: str) -> dict[str, str]:
    origin = origin.replace("PORT", str(server.port))
    return {"origin": origin, "authorization": f"Bearer {KEY}"}


async def changing_routes(server: Running) -> list[tuple[str, str]]:
    """Every documented method and path that may change something."""
    document = await server.http.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"})
    routes = [
        (method.upper(), re.sub(r"\{\w+\}", "x", path))
        for path, methods in document.json()["paths"].items()
        for method in methods
        if method not in SAFE_METHODS
    ]
    assert len(routes) >= 4
    return routes


async def test_foreign_origin_is_403_on_all_that_changes_state(server: Running) -> None:
    for method, path in await changing_routes(server):
        for origin in FOREIGN:
            answer = await server.http.request(
                method, path, headers=headers(server, origin), json={"prompt": "hi"}
            )
            assert answer.status_code == 403, (method, path, origin)
            assert b"foreign_origin" in answer.content
            assert "access-control-allow-origin" not in answer.headers
    stats = await server.stats()
    assert (stats.num_sessions, stats.prompt_tokens_total) == (0, 0)


async def test_foreign_origin_is_403_on_sockets(server: Running) -> None:
    for origin in FOREIGN:
        for options in ({}, {"subprotocols": ["everstream.v1"]}):
            with pytest.raises(InvalidStatus) as refused:
                async with server.socket(additional_headers=headers(server, origin), **options):
                    pass
            assert refused.value.response.status_code == 403, origin


async def test_preflight_of_a_foreign_page_is_not_allowed(server: Running) -> None:
    asked = {"origin": FOREIGN[0], "access-control-request-method": "POST"}
    answer = await server.http.options("/v1/completions", headers=asked)
    assert answer.status_code >= 400
    assert "access-control-allow-origin" not in answer.headers


async def test_own_page_and_programs_are_allowed(server: Running) -> None:
    own = headers(server, "http://127.0.0.1:PORT")
    program = {"authorization": own["authorization"]}
    for allowed in (own, program):
        assert (await server.http.post("/v1/sessions", headers=allowed)).status_code == 200
        async with server.socket(additional_headers=allowed) as client:
            await send(client, type="create", request_id="a")
            assert (await receive(client))["type"] == "created"


# The logs


@dataclass(frozen=True)
class Secrets:
    """What clients send and must not be in a log, in any of its forms."""

    key: str = "es-KeyThatNobodyMayFind"
    wrong_key: str = "es-WrongKeyThatNobodyMayFind"
    prompt: str = "PromptThatNobodyMayFind"

    def forms(self) -> Iterator[str]:
        for secret in (self.key, self.wrong_key, self.prompt):
            yield secret
            yield base64.urlsafe_b64encode(secret.encode()).decode().rstrip("=")
            yield secret.encode().hex()
        yield hashlib.sha256(self.key.encode()).hexdigest()


SECRETS = Secrets()
KEYS = {"EVERSTREAM_API_KEYS": SECRETS.key}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def offers(key: str) -> Any:
    encoded = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    return ["everstream.v1", f"everstream.key.{encoded}"]


def ask_everything(server: ServerProcess) -> None:
    """Right, wrong and broken requests, each with all the secrets that fit in."""
    long = SECRETS.prompt * 5000
    bodies: list[dict[str, Any]] = [
        {"json": {"prompt": SECRETS.prompt, "max_tokens": 2, "keep": True}},
        {"json": {"prompt": SECRETS.prompt, "max_tokens": 2, "stream": True}},
        {"json": {"prompt": long, "max_tokens": 1}},
        {"json": {"prompt": SECRETS.prompt, "stop": SECRETS.prompt, "user": SECRETS.prompt}},
        {"json": {"prompt": [SECRETS.prompt]}},
        {"json": {"prompt": SECRETS.prompt, SECRETS.prompt: 1}},
        {"json": {"prompt": SECRETS.prompt, "model": SECRETS.prompt}},
        {"json": {"prompt": SECRETS.prompt, "session": SECRETS.prompt}},
        {"content": f'{{"prompt": "{SECRETS.prompt}", }}'},
        {"content": f'{{"prompt": "{SECRETS.prompt}", "temperature": NaN}}'},
        {"content": long.encode() * 20},
    ]
    paths = ("", SECRETS.prompt, f"?key={SECRETS.key}&prompt={SECRETS.prompt}")
    with httpx.Client(base_url=server.url, timeout=STUCK_S) as http:
        for key in (SECRETS.key, SECRETS.wrong_key):
            for body in bodies:
                http.post("/v1/completions", headers=bearer(key), **body)
            for path in paths:
                http.get(f"/v1/sessions/{path}", headers=bearer(key))
                http.post(f"/v1/sessions/{path}", headers=bearer(key), json={})
            http.get("/v1/models", headers={**bearer(key), "origin": f"https://{key}"})
            http.get("/v1/models", headers={**bearer(key), "host": SECRETS.prompt + "/"})
            http.get("/v1/models", headers={**bearer(key), "cookie": SECRETS.key * 2000})
            http.get("/v1/models", auth=(SECRETS.prompt, key))


def talk_on_sockets(server: ServerProcess) -> None:
    frames: list[str | bytes] = [
        f'{{"type": "generate", "request_id": "a", "prompt": "{SECRETS.prompt}", "max_tokens": 2}}',
        f'{{"type": "generate", "request_id": "{SECRETS.prompt}", "prompt": 3}}',
        f'{{"type": "{SECRETS.prompt}", "request_id": "a"}}',
        SECRETS.prompt,
        SECRETS.prompt.encode(),
    ]
    options: list[dict[str, Any]] = [
        {"additional_headers": bearer(SECRETS.key)},
        {"subprotocols": offers(SECRETS.key)},
        {"subprotocols": offers(SECRETS.wrong_key)},
        {"additional_headers": bearer(SECRETS.wrong_key)},
    ]
    for option in options:
        with (
            suppress(ConnectionClosed, InvalidStatus),
            connect(server.stream_url, **option) as client,
        ):
            for frame in frames:
                client.send(frame)
                client.recv(timeout=STUCK_S)
            client.send(SECRETS.prompt * 100_000)  # too large: the server closes
            while True:
                client.recv(timeout=STUCK_S)


def send_garbage(server: ServerProcess) -> None:
    """What no client library sends."""
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 99"
    for line in (
        f"GET /{SECRETS.prompt} HTTP/1.1\r\nHost: localhost\r\nAuthorization Bearer {SECRETS.key}",
        f"{SECRETS.prompt}\r\nAuthorization: Bearer {SECRETS.key}",
        f"GET / HTTP/9.{SECRETS.key}",
        (
            "GET /v1/stream HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {SECRETS.key}\r\n{upgrade}"
        ),
        f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SECRETS.prompt}",
    ):
        with socket.create_connection((LOCAL, server.port)) as peer:
            peer.settimeout(STUCK_S)
            peer.sendall(f"{line}\r\nConnection: close\r\n\r\n".encode())
            with suppress(ConnectionResetError):
                while peer.recv(65536):
                    pass


@pytest.mark.parametrize("format", ["text", "json"])
def test_keys_and_prompts_are_in_no_line_of_the_log(format: str) -> None:
    flags = ("--store", "memory", "--log-level", "debug", "--log-format", format)
    with ServerProcess(*flags, environment=KEYS) as server:
        ask_everything(server)
        talk_on_sockets(server)
        send_garbage(server)
        assert server.stop() == 0
        log = server.log()
    assert "draining" in log
    assert [form for form in SECRETS.forms() if form.lower() in log.lower()] == []
