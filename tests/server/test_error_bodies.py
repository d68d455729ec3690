"""Every error has a JSON body in the shape of the API, also below the application."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from benchmarks.websocket import handshake
from server.store.base import Fenced
from tests.reliability.servers import FAKE, LOCAL, ServerProcess
from tests.server.failing_store import FailingStore
from tests.server.harness import Running, running
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD = b"host: localhost\r\nconnection: close\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Running]:
    """It answers to the name that absolute targets have here."""
    async with running(allowed_hosts=("x",)) as started:
        yield started


@dataclass(frozen=True)
class Answer:
    """What came back, read by hand: a client library would hide half of it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, data: bytes) -> Answer:
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if headers.get("transfer-encoding") == "chunked":
            body = body.partition(b"\r\n")[2].rpartition(b"\r\n0\r\n")[0]
        return cls(int(first.split()[1]), headers, body)

    def check(self, status: int, code: str) -> None:
        """It is an error with this status and code, in the shape of the API."""
        assert (self.status, self.headers.get("content-type")) == (status, "application/json"), self
        error = json.loads(self.body)["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert error["code"] == code
        assert error["message"]


def get(path: str, more: bytes = b"") -> bytes:
    return f"GET {path} HTTP/1.1\r\n".encode() + HEAD + more + b"\r\n"


def post(path: str, body: bytes, more: bytes = b"") -> bytes:
    length = f"content-length: {len(body)}\r\n".encode()
    return f"POST {path} HTTP/1.1\r\n".encode() + HEAD + length + more + b"\r\n" + body


REFUSED = {
    "not HTTP": (b"nonsense\r\n\r\n", 400, "invalid_value"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_value"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_value"),
    "long head": (get("/", b"x: " + b"y" * 40_000 + b"\r\n"), 400, "invalid_value"),
    "unknown transfer encoding": (
        get("/v1/models", b"transfer-encoding: gzip\r\n"),
        400,
        "invalid_value",
    ),
    "no length": (get("/v1/models", b"content-length: a\r\n"), 400, "invalid_value"),
    "no route": (get("/v2/models"), 404, "not_found"),
    "no static file": (get("/static/none.js"), 404, "not_found"),
    "static file above": (get("/static/../config.py"), 404, "not_found"),
    "static file above, encoded": (get("/static/%2e%2e/config.py"), 404, "not_found"),
    "static folder": (get("/static/"), 404, "not_found"),
    "target of OPTIONS": (b"OPTIONS * HTTP/1.1\r\n" + HEAD + b"\r\n", 404, "not_found"),
    "method": (b"DELETE /v1/models HTTP/1.1\r\n" + HEAD + b"\r\n", 405, "method_not_allowed"),
    "unknown method": (b"FOO /v1/models HTTP/1.1\r\n" + HEAD + b"\r\n", 405, "method_not_allowed"),
    "method of static files": (post("/static/app.js", b""), 405, "method_not_allowed"),
    "large body": (
        post("/v1/completions", b"", b"")[:-2].replace(b"th: 0", b"th: 9999999") + b"\r\n",
        413,
        "body_too_large",
    ),
    "failure of the engine": (post("/v1/completions", b'{"prompt": "<fail>"}'), 500, None),
    "socket to no route": (handshake("/v2/stream"), 404, "not_found"),
    "socket to an HTTP route": (handshake("/v1/completions"), 404, "not_found"),
    "socket to a file": (handshake("/static/app.js"), 404, "not_found"),
    "socket of an old version": (handshake(sec_websocket_version="8"), 400, "invalid_value"),
    "socket without a version": (handshake(sec_websocket_version=None), 400, "invalid_value"),
    "socket without a key": (handshake(sec_websocket_key=None), 400, "invalid_value"),
    "socket with a bad key": (handshake(sec_websocket_key="x"), 400, "invalid_value"),
    "socket by POST": (handshake().replace(b"GET", b"POST"), 405, "method_not_allowed"),
    "socket with a body": (handshake(content_length="3"), 400, "invalid_value"),
    "socket with a long header": (handshake(x="y" * 9000), 400, "invalid_value"),
    "socket with many headers": (
        handshake(**{f"x{number}": "y" for number in range(300)}),
        400,
        "invalid_value",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refusal_has_the_shape_of_an_error(name: str, server: Running) -> None:
    sent, status, code = REFUSED[name]
    answer = Answer.of(await server.exchange(sent))
    answer.check(status, code or "internal_error")


@pytest.mark.parametrize("range", ["bytes=9999999-", "bytes=b-a", "lines=1-2", "bytes=0-1"])
@pytest.mark.parametrize("path", ["/", "/static/app.js"])
async def test_range_of_a_page_is_not_honoured(path: str, range: str, server: Running) -> None:
    whole = await server.http.get(path)
    response = await server.http.get(path, headers={"range": range})
    assert (response.status_code, response.content) == (200, whole.content)
    assert response.headers["accept-ranges"] == "none"


class Panic(BaseException):
    """What an extension module raises that has failed: no `Exception`."""


@pytest.mark.parametrize("error", [Panic("secret"), ValueError("secret"), RecursionError("secret")])
async def test_failure_of_the_application_has_the_shape_of_an_error(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as server:

        def fail(text: str) -> list[int]:
            raise error

        server.server.config.app.state.models.default.tokenizer.encode = fail
        data = await server.exchange(post("/v1/completions", b'{"prompt": "a"}'))
        answer = Answer.of(data)
        answer.check(500, "internal_error")
        assert b"secret" not in data
        assert "secret" in caplog.text  # the operator sees what it was
        assert (await server.http.get("/health")).status_code == 200


@pytest.mark.process
async def test_request_that_the_end_of_the_server_cuts_short_gets_503() -> None:
    """Its body never comes; the drain does not wait for it."""
    async with asyncio.timeout(60):
        with ServerProcess(program=FAKE) as server:
            reader, writer = await asyncio.open_connection(LOCAL, server.port)
            writer.write(post("/v1/completions", b"0123456789")[:-3])
            gone, other = await asyncio.open_connection(LOCAL, server.port)
            other.write(handshake("/v1/stream")[:-2])
            await eventually(lambda: server.get("/health")[0] == 200)
            await asyncio.to_thread(_terminate, server)
            Answer.of(await reader.read()).check(503, "draining")
            await gone.read()
            writer.close()
            other.close()
            assert await asyncio.to_thread(server.wait) == 0
            assert "Traceback" not in server.log()


@pytest.mark.process
async def test_request_that_waits_while_its_process_is_fenced_off_gets_503() -> None:
    """For longer than the end of the process waits: the rest of its body never comes."""
    store = FailingStore()
    async with running(store=store) as server:
        waiting = asyncio.create_task(server.exchange(post("/v1/completions", b"0123456789")[:-3]))
        await eventually(lambda: server.server.server_state.tasks)
        store.error = Fenced("another process has the store")
        Answer.of(await waiting).check(503, "draining")
        await server.done
        assert server.server.exit_code == 1


def _terminate(server: ServerProcess) -> None:
    server._running.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("scheme", ["http", "HTTPS"])
async def test_absolute_form_of_the_target_means_its_path(scheme: str, server: Running) -> None:
    models = (await server.http.get("/v1/models")).json()
    answer = Answer.of(await server.exchange(get(f"{scheme}://x:80/v1/models")))
    assert (answer.status, json.loads(answer.body)) == (200, models)
    for target in ("http://x", "http://x?a=b", "http://x/"):
        answer = Answer.of(await server.exchange(get(target)))
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/html")
    answer = Answer.of(await server.exchange(get("http://x/v1/sessions/a%20b?x=1")))
    answer.check(404, "session_not_found")
    data = await server.exchange(handshake("http://x/v2/stream"))
    Answer.of(data).check(404, "not_found")


async def test_host_of_an_absolute_target_counts_and_is_checked(server: Running) -> None:
    for target in ("http://user@x/v1/models", "http:///v1/models", "http://a b/", "ftp://x/"):
        answer = Answer.of(await server.exchange(get(target)))
        assert answer.status in (400, 404), target
    origin = b"origin: http://evil\r\n"
    body = b'{"prompt": "a"}'
    own = Answer.of(await server.exchange(post("http://x/v1/completions", body, origin)))
    own.check(403, "foreign_origin")


async def test_key_is_asked_for_by_an_absolute_target_too() -> None:
    async with running(api_keys=("key",)) as server:
        for path in ("http://x/v1/models", "/v1/models"):
            Answer.of(await server.exchange(get(path))).check(401, "invalid_api_key")
        answer = Answer.of(
            await server.exchange(get("http://x/v1/models", b"authorization: Bearer key\r\n"))
        )
        assert answer.status == 200
