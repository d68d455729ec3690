"""06: of every answer: a request id, CORS for allowed pages, a head for HEAD; no compression."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from benchmarks.websocket import handshake
from server.sessions.sessions import Sessions
from tests.server.harness import Running, receive, receive_until, running, send

KEY, PAGE = "the-right-key", "https://page.example"
BEARER = {"authorization": f"Bearer {KEY}"}
#: Of OpenAI's JavaScript client, and of those that continue with a stream.
SENT = (
    *("authorization", "content-type", "user-agent", "accept", "api-key", "x-request-id"),
    *("x-stainless-arch", "x-stainless-lang", "x-stainless-os", "x-stainless-package-version"),
    *("x-stainless-retry-count", "x-stainless-runtime", "x-stainless-runtime-version"),
    *("x-stainless-timeout", "x-stainless-helper-method", "x-stainless-poll-helper"),
    *("idempotency-key", "last-event-id", "openai-organization", "openai-project", "openai-beta"),
)
READ = {"x-request-id", "retry-after", "www-authenticate", "allow", "etag", "stream-closed"}
READ |= {"stream-next-offset", "stream-up-to-date", "stream-cursor", "x-everstream-ignored"}
GETS = ("/", "/health", "/ready", "/metrics", "/docs", "/openapi.json", "/asyncapi.json")
GETS_V1 = ("/v1/models", "/v1/sessions", "/tokenizer_info", "/static/page.css", "/v1/models/none")


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(api_keys=(KEY,), allowed_origins=(PAGE,), max_body_bytes=4096) as started:
        yield started


def preflight(origin: str = PAGE, method: str = "POST", *names: str) -> dict[str, str]:
    asked = {"origin": origin, "access-control-request-method": method}
    return asked | ({"access-control-request-headers": ",".join(names)} if names else {})


async def options(server: Running, headers: dict[str, str]) -> httpx.Response:
    return await server.http.options("/v1/completions", headers=headers)


# Pages


async def test_page_may_send_what_clients_send(server: Running) -> None:
    answer = await options(server, preflight(PAGE, "POST", *SENT))
    assert answer.status_code == 200
    allowed = answer.headers["access-control-allow-headers"].split(",")
    assert set(SENT) <= set(allowed)
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
async def test_page_may_ask_by_every_method_that_there_is(server: Running, method: str) -> None:
    answer = await options(server, preflight(PAGE, method))
    assert method in answer.headers["access-control-allow-methods"].split(", ")


async def test_refused_preflight_is_json(server: Running) -> None:
    for headers, status, code in (
        (preflight("https://evil.example"), 403, "foreign_origin"),
        (preflight(PAGE, "BREW"), 405, "method_not_allowed"),
    ):
        answer = await options(server, headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "access-control-allow-origin" in answer.headers  # of the second: the page may read it


async def test_names_that_are_none_are_not_repeated(server: Running) -> None:
    for name in ("a b", "a;b", "<script>", "a" * 5000):
        answer = await options(server, preflight(PAGE, "POST", name))
        assert "access-control-allow-headers" not in answer.headers


async def test_page_may_read_our_headers_of_answers_and_refusals(server: Running) -> None:
    for headers, status in ((BEARER, 200), ({}, 401)):
        answer = await server.http.get("/v1/models", headers={"origin": PAGE, **headers})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert set(exposed) == READ
        assert "origin" in answer.headers["vary"].lower()


async def test_other_pages_may_read_nothing(server: Running) -> None:
    headers = {"origin": "https://evil.example", **BEARER}
    answer = await server.http.get("/v1/models", headers=headers)
    assert "access-control-allow-origin" not in answer.headers


# Request ids


async def test_every_answer_has_a_request_id_refusals_too(server: Running) -> None:
    seen = set()
    for method, path, headers, status in (
        ("GET", "/health", {}, 200),
        ("GET", "/v1/models", BEARER, 200),
        ("GET", "/v1/models", {}, 401),
        ("GET", "/nothing", BEARER, 404),
        ("PUT", "/v1/models", BEARER, 405),
        ("POST", "/v1/sessions", {**BEARER, "origin": "https://evil.example"}, 403),
        ("POST", "/v1/completions", BEARER, 413),
        ("GET", "/health%00", {}, 400),
        ("GET", "/health", {"host": "a b"}, 400),
        ("GET", "/health", {"x-large": "a" * 33_000}, 431),
    ):
        url = httpx.URL(f"http://127.0.0.1:{server.port}").copy_with(raw_path=path.encode())
        content = b" " * 5000 if status == 413 else None
        answer = await server.http.request(method, url, headers=headers, content=content)
        assert answer.status_code == status, (path, answer.text)
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == 10


async def test_what_is_no_http_is_answered_with_a_request_id(server: Running) -> None:
    assert b"x-request-id: req_" in await server.exchange(b"nonsense\r\n\r\n")


async def test_client_s_own_request_id_comes_back(server: Running) -> None:
    answer = await server.http.get("/health", headers={"x-request-id": "mine-1.a:b/c"})
    assert answer.headers.get_list("x-request-id") == ["mine-1.a:b/c"]
    for bad in ("", "a b", "a" * 129, "é", "<b>", "a\tb"):
        answer = await server.http.get("/health", headers=[(b"x-request-id", bad.encode())])
        (id,) = answer.headers.get_list("x-request-id")
        assert id.startswith("req_")


async def test_socket_has_a_request_id_accepted_or_not(server: Running) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/stream"
    async with connect(url, additional_headers={**BEARER, "x-request-id": "mine"}) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "mine"
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url):
            pass
    assert refused.value.response.headers["x-request-id"].startswith("req_")


async def test_failure_of_ours_is_named_and_readable_by_pages(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(Sessions, "listed", fail)
    headers = {**BEARER, "origin": PAGE, "x-request-id": "mine"}
    answer = await server.http.get("/v1/sessions", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert answer.headers["access-control-allow-origin"] == PAGE


# Keys


async def test_key_may_come_as_api_key(server: Running) -> None:
    for headers, status in (
        ({"api-key": KEY}, 200),
        ({"api-key": "wrong"}, 401),
        ({"api-key": ""}, 401),
        ({"api-key": KEY, "authorization": "Bearer wrong"}, 401),
        ({"api-key": KEY, "authorization": "Basic eDp5"}, 200),
    ):
        answer = await server.http.get("/v1/models", headers=headers)
        assert answer.status_code == status, headers
    url = f"ws://127.0.0.1:{server.port}/v1/stream"
    async with connect(url, additional_headers={"api-key": KEY}):
        pass


# Bodies


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate", "zstd", "x", "gzip, br"])
async def test_compressed_body_is_415(server: Running, encoding: str) -> None:
    body = gzip.compress(b'{"prompt": "a", "max_tokens": 1}')
    for path in ("/v1/completions", "/v1/responses", "/v1/sessions/import"):
        headers = {**BEARER, "content-encoding": encoding}
        answer = await server.http.post(path, content=body, headers=headers)
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
        assert answer.json()["error"]["code"] == "unsupported_encoding"


async def test_identity_is_no_compression(server: Running) -> None:
    headers = {**BEARER, "content-encoding": "identity"}
    answer = await server.http.post("/v1/sessions", headers=headers)
    assert answer.status_code == 200


# HEAD


@pytest.mark.parametrize("path", GETS + GETS_V1)
async def test_head_is_get_without_its_body(server: Running, path: str) -> None:
    got = await server.http.get(path, headers=BEARER)
    head = await server.http.head(path, headers=BEARER)
    assert head.status_code == got.status_code
    assert head.content == b""
    volatile = {"date", "x-request-id", "content-length" if path == "/metrics" else "date"}
    assert {n: v for n, v in head.headers.items() if n not in volatile} == {
        n: v for n, v in got.headers.items() if n not in volatile
    }


async def test_head_of_a_stream_ends_with_its_head(server: Running) -> None:
    """Of a session that continues: a GET would read it until it ends."""
    async with connect(
        f"ws://127.0.0.1:{server.port}/v1/stream", additional_headers=BEARER
    ) as socket:
        work = {"type": "generate", "request_id": "r", "prompt": "a", "keep": True}
        await send(socket, **work, max_tokens=1_000_000, ignore_eos=True)
        session = (await receive(socket))["session"]
        await send(socket, type="detach", request_id="r")
        await receive_until(socket, "detached")
        head = await server.http.head(f"/v1/sessions/{session}/events", headers=BEARER)
        info = (await server.http.get(f"/v1/sessions/{session}", headers=BEARER)).json()
        assert info["busy"]
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


async def test_head_where_no_get_is_405_and_get_s_routes_name_it(server: Running) -> None:
    head = await server.http.head("/v1/completions", headers=BEARER)
    assert (head.status_code, head.headers["allow"]) == (405, "POST")
    put = await server.http.put("/v1/models", headers=BEARER)
    assert put.headers["allow"] == "GET, HEAD"


async def test_handshake_by_head_is_no_socket(server: Running) -> None:
    data = handshake(authorization=f"Bearer {KEY}").replace(b"GET ", b"HEAD ")
    answer = await server.exchange(data)
    assert not answer.startswith(b"HTTP/1.1 101")
