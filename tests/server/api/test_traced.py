from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from starlette.types import Message, Receive, Scope, Send

from server.api.gate import Traced, traced
from server.engine.types import Finished, Request, SamplingParams, Usage
from server.observability.otel import OtelTracer
from server.observability.tracing import OFF

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Authenticated:
    """Stands in for what finds out whose a request is."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["owner"] = "acme"
        await self._app(scope, receive, send)


class Served:
    """A small application behind the middleware, and the spans that it made."""

    def __init__(self) -> None:
        self._exported = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exported))
        self.tracer = OtelTracer(provider)
        self.app = FastAPI()
        self.app.add_api_route("/v1/sessions/{id}", self.session)
        self.app.add_api_route("/v1/generate", self.generate, methods=["POST"])
        self.app.add_api_route("/v1/broken", self.broken)
        self.app.add_api_route("/v1/busy", self.busy)
        self.app.add_api_route("/health", self.session)
        self.app.add_middleware(Authenticated)
        self.app.add_middleware(traced, tracer=self.tracer)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exported.get_finished_spans())

    async def session(self, id: str = "") -> str:
        return id

    async def busy(self) -> Response:
        return Response(status_code=503)

    async def broken(self) -> None:
        raise RuntimeError("once upon a time")

    async def generate(self) -> None:
        await asyncio.create_task(self.work())

    async def work(self) -> None:
        request = Request("r1", "acme", (1,), SamplingParams())
        generation = self.tracer.generation(request, request.request_id)
        generation.finished(Finished("r1", None, 1, 2, "", "stop", Usage(1, 1)), 0.5)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)


@pytest.fixture
def served() -> Served:
    return Served()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_request_has_a_span_with_route_status_and_tenant(served: Served) -> None:
    await served.request("GET", "/v1/sessions/sess_1?key=secret")
    (span,) = served.spans
    assert span.kind is SpanKind.SERVER
    assert span.name == "GET /v1/sessions/{id}"
    assert span.parent is None
    assert attributes(span) == {
        "http.request.method": "GET",
        "http.route": "/v1/sessions/{id}",
        "http.response.status_code": 200,
        "url.path": "/v1/sessions/sess_1",
        "url.scheme": "http",
        "everstream.tenant": "acme",
    }


async def test_span_belongs_to_the_trace_of_the_client(served: Served) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    await served.request("GET", "/v1/sessions/a", headers=headers)
    (span,) = served.spans
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("header", ["", "00-0-0-01", TRACEPARENT.upper() * 20, "\xff"])
async def test_malformed_traceparent_begins_a_new_trace(served: Served, header: str) -> None:
    headers = [(b"traceparent", header.encode("latin-1"))]
    await served.request("GET", "/v1/sessions/a", headers=headers)
    (span,) = served.spans
    assert span.parent is None


async def test_trace_that_the_client_does_not_record_is_not_recorded(served: Served) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    await served.request("POST", "/v1/generate", headers=headers)
    assert served.spans == []


async def test_generation_is_within_its_request(served: Served) -> None:
    await served.request("POST", "/v1/generate")
    generation, request = served.spans
    assert generation.name == "generate"
    assert generation.parent == request.context


async def test_requests_at_once_keep_their_generations_apart(served: Served) -> None:
    await asyncio.gather(*(served.request("POST", "/v1/generate") for _ in range(8)))
    requests = [span.context for span in served.spans if span.kind is SpanKind.SERVER]
    parents = [span.parent for span in served.spans if span.name == "generate"]
    assert len(requests) == 8
    assert all(context in parents for context in requests)


async def test_nothing_of_a_request_is_left_after_it(served: Served) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    await call(Traced(answer, served.tracer), "http")
    assert not get_current_span().get_span_context().is_valid


@pytest.mark.parametrize(("path", "kind"), [("/v1/busy", "503"), ("/v1/broken", "RuntimeError")])
async def test_failure_of_the_server_is_an_error(served: Served, path: str, kind: str) -> None:
    response = await served.request("GET", path)
    (span,) = served.spans
    assert response.status_code >= 500
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == kind
    assert "once upon" not in span.to_json()


async def test_mistake_of_the_client_is_no_error(served: Served) -> None:
    await served.request("GET", "/v1/nothing")
    (span,) = served.spans
    assert span.name == "GET"
    assert attributes(span)["http.response.status_code"] == 404
    assert span.status.status_code is StatusCode.UNSET


async def test_invented_method_is_no_name_of_a_span(served: Served) -> None:
    await served.request("BREW", "/v1/sessions/a")
    (span,) = served.spans
    assert attributes(span)["http.request.method"] == "_OTHER"
    assert "BREW" not in span.to_json()


async def test_endless_path_is_cut(served: Served) -> None:
    await served.request("GET", "/v1/" + "a" * 9000)
    (span,) = served.spans
    assert len(attributes(span)["url.path"]) == 256


async def test_probes_have_no_span(served: Served) -> None:
    await served.request("GET", "/health")
    assert served.spans == []


async def test_socket_has_no_span_but_its_generations_have_its_trace(served: Served) -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.gather(served.work(), served.work())

    headers = [(b"traceparent", TRACEPARENT.encode())]
    await call(Traced(stream, served.tracer), "websocket", headers)
    assert [span.name for span in served.spans] == ["generate", "generate"]
    assert {f"{span.parent.span_id:016x}" for span in served.spans if span.parent} == {PARENT}
    assert not get_current_span().get_span_context().is_valid


async def test_lifespan_passes(served: Served) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await Traced(app, served.tracer)({"type": "lifespan"}, nothing, ignore)
    assert seen == ["lifespan"]


async def test_disabled_tracing_does_not_wrap_the_application(served: Served) -> None:
    assert traced(served.app, OFF) is served.app
    assert isinstance(traced(served.app, served.tracer), Traced)


async def call(app: Traced, type: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    scope = {"type": type, "path": "/v1/stream", "scheme": type, "headers": headers or []}
    await app(scope | {"method": "GET"}, nothing, ignore)


async def nothing() -> Message:
    raise AssertionError


async def ignore(message: Message) -> None:
    """The server takes everything."""
