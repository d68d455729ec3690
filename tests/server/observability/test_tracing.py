from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from server.engine.types import Finished, FinishReason, Request, SamplingParams, Usage
from server.errors import QueueFull
from server.observability import otel
from server.observability.otel import OtelTracer
from server.observability.tracing import OFF, TracingError, open_tracer

GENERATE = Request("r1", "acme", (1, 2, 3), SamplingParams(), session="sess_1")
APPEND = Request("r2", "acme", (1, 2, 3), None)


def finished(reason: FinishReason | None = "stop", session: str | None = "sess_1") -> Finished:
    return Finished("r1", session, 9, 12, "once upon", reason, Usage(3, 8), "no more of it")


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exported: InMemorySpanExporter) -> OtelTracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return OtelTracer(provider)


def only(exported: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exported.get_finished_spans()
    return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_generation_has_tenant_session_tokens_ttft_and_reason(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    tracer.generation(GENERATE, "r1").finished(finished(), 0.25)
    span = only(exported)
    assert span.name == "generate"
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span) == {
        "everstream.tenant": "acme",
        "everstream.request_id": "r1",
        "everstream.session": "sess_1",
        "everstream.ttft_s": 0.25,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ("stop",),
    }


def test_generation_ends_where_its_request_does(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    generation = tracer.generation(GENERATE, "r1")
    assert exported.get_finished_spans() == ()
    generation.finished(finished(), None)
    assert len(exported.get_finished_spans()) == 1


def test_append_is_no_generation(tracer: OtelTracer, exported: InMemorySpanExporter) -> None:
    tracer.generation(APPEND, "r2").finished(finished(None, None), None)
    span = only(exported)
    assert span.name == "append"
    assert attributes(span) == {
        "everstream.tenant": "acme",
        "everstream.request_id": "r2",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
    }


def test_failed_generation_has_the_errors_code(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    tracer.generation(GENERATE, "r1").failed(QueueFull("256 requests are waiting"))
    span = only(exported)
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "queue_full"


def test_generation_that_ends_in_an_error_is_one(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    tracer.generation(GENERATE, "r1").finished(finished("error"), 0.25)
    assert only(exported).status.status_code is StatusCode.ERROR


def test_each_choice_has_a_span_under_its_own_id(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    for id in ("r1", "r1/1"):
        tracer.generation(GENERATE, id).finished(finished(), 0.25)
    ids = [attributes(span)["everstream.request_id"] for span in exported.get_finished_spans()]
    assert ids == ["r1", "r1/1"]


@pytest.mark.parametrize("why", ["detached", "migrated"])
def test_span_ends_when_the_reader_detaches(
    tracer: OtelTracer, exported: InMemorySpanExporter, why: Literal["detached", "migrated"]
) -> None:
    tracer.generation(GENERATE, "r1").left(why)
    span = only(exported)
    assert attributes(span)["everstream.left"] == why
    assert span.status.status_code is StatusCode.UNSET


def test_generation_ends_once(
    tracer: OtelTracer, exported: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    generation = tracer.generation(GENERATE, "r1")
    generation.finished(finished(), 0.25)
    generation.failed(QueueFull("late"))
    generation.left("detached")
    generation.finished(finished(), 0.5)
    assert attributes(only(exported))["everstream.ttft_s"] == 0.25
    assert caplog.records == []


def test_text_of_prompt_answer_and_error_is_in_no_span(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    tracer.generation(GENERATE, "r1").finished(finished("error"), 0.25)
    tracer.generation(GENERATE, "r1").failed(QueueFull("no more of it"))
    shown = "".join(span.to_json() for span in exported.get_finished_spans())
    assert "once upon" not in shown
    assert "no more of it" not in shown


def test_close_leaves_a_collector_that_does_not_answer() -> None:
    released, ended = threading.Event(), threading.Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            released.wait()
            ended.set()

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Stuck())
    OtelTracer(provider, close_timeout_s=0.01).close()
    assert not ended.is_set()
    released.set()
    assert ended.wait(60)


def test_tracing_is_disabled_without_an_endpoint() -> None:
    assert open_tracer(None, "0.0.0") is OFF


def test_disabled_tracer_accepts_every_call() -> None:
    with OFF.request({"type": "http"}) as span:
        span.responded(200)
    with pytest.raises(QueueFull), OFF.request({"type": "http"}):
        raise QueueFull("full")
    generation = OFF.generation(GENERATE, "r1")
    generation.finished(finished(), 0.25)
    generation.failed(QueueFull("full"))
    generation.left("migrated")
    OFF.close()


@pytest.mark.process
def test_disabled_tracing_does_not_import_opentelemetry() -> None:
    code = (
        "import sys\nfrom server.observability.tracing import open_tracer\n"
        "open_tracer(None, '0').close()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.process
def test_missing_package_is_an_error_that_names_the_extra() -> None:
    code = (
        "import sys\nsys.modules['opentelemetry.sdk'] = None\n"
        "from server.observability.tracing import TracingError, open_tracer\n"
        "try:\n    open_tracer('http://127.0.0.1:1', '0')\n"
        "except TracingError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--otel-endpoint" in run.stdout
    assert "pip install 'everstream[otel]'" in run.stdout


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "grpc://localhost:4317"])
def test_endpoint_that_is_no_url_is_an_error(endpoint: str) -> None:
    with pytest.raises(TracingError, match="--otel-endpoint"):
        open_tracer(endpoint, "0.0.0")


class Collector(ThreadingHTTPServer):
    """Takes what is exported to it, decoded by the protocol's own definition."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Exports)
        self.paths: list[str] = []
        self.exports: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Exports(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        self.server.exports.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal."""


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("", "/v1/traces"),
        ("/", "/v1/traces"),
        ("/v1/traces", "/v1/traces"),
        ("/otlp/", "/otlp/v1/traces"),
    ],
)
def test_spans_reach_a_collector(base: str, path: str) -> None:
    with collector() as server:
        tracer = otel.connect(server.url + base, "1.2.3", export_timeout_s=60, close_timeout_s=60)
        tracer.generation(GENERATE, "r1").finished(finished(), 0.25)
        tracer.close()
        (export,) = server.exports
        assert server.paths == [path]
    (resource,) = export.resource_spans
    about = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert (about["service.name"], about["service.version"]) == ("everstream", "1.2.3")
    (span,) = resource.scope_spans[0].spans
    given = {item.key: item.value for item in span.attributes}
    assert span.name == "generate"
    assert given["everstream.session"].string_value == "sess_1"
    assert given["everstream.ttft_s"].double_value == 0.25
    assert given["gen_ai.usage.output_tokens"].int_value == 8
    assert span.end_time_unix_nano >= span.start_time_unix_nano > 0


@pytest.mark.process
def test_service_can_be_renamed_by_the_environment() -> None:
    with collector() as server:
        code = (
            "from server.observability.tracing import open_tracer\n"
            "from tests.server.observability.test_tracing import GENERATE, finished\n"
            f"tracer = open_tracer('{server.url}', '1.2.3')\n"
            "tracer._close_timeout_s = 60\n"
            "tracer.generation(GENERATE, 'r1').finished(finished(), None)\ntracer.close()"
        )
        environment = {"OTEL_SERVICE_NAME": "stories", "OTEL_EXPORTER_OTLP_HEADERS": "x-team=a"}
        command = ["env", *(f"{n}={v}" for n, v in environment.items()), sys.executable, "-c", code]
        subprocess.run(command, check=True)
        (export,) = server.exports
    about = {i.key: i.value.string_value for i in export.resource_spans[0].resource.attributes}
    assert about["service.name"] == "stories"


@pytest.mark.process
def test_process_ends_without_its_collector() -> None:
    with collector() as server:
        url = server.url  # where no server listens any more
    code = (
        "from server.observability.tracing import open_tracer\n"
        "from tests.server.observability.test_tracing import GENERATE, finished\n"
        f"tracer = open_tracer('{url}', '0.0.0')\n"
        "tracer.generation(GENERATE, 'r1').finished(finished(), None)\n"
        "tracer.close()\nprint('ended')"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "ended\n"
