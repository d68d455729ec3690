"""Traces by OpenTelemetry, sent as OTLP over HTTP from a thread of the package's own.

Names are those of its semantic conventions where these have one. The packages read
``OTEL_*`` variables: headers of the export, sampling, the service's name. What waits
to be sent is bounded; where the collector does not keep up, spans are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from server.engine.types import Finished, Request
from server.errors import RequestError

PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5
CLOSE_TIMEOUT_S = 2.0
MAX_PATH = 256

# Any other is of the client's making, and would be one more name of a span.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PROPAGATOR = TraceContextTextMapPropagator()


def connect(
    endpoint: str,
    version: str,
    export_timeout_s: float = EXPORT_TIMEOUT_S,
    close_timeout_s: float = CLOSE_TIMEOUT_S,
) -> OtelTracer:
    """A tracer that sends to the collector with the base URL ``endpoint``."""
    ours = Resource.create({"service.name": "everstream", "service.version": version})
    provider = TracerProvider(
        resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    url = endpoint.rstrip("/").removesuffix(PATH) + PATH
    exporter = OTLPSpanExporter(url, timeout=export_timeout_s)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracer(provider, close_timeout_s)


class OtelTracer:
    """A `Tracer` with a ``provider`` of its own: the global one stays as it is."""

    def __init__(self, provider: TracerProvider, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._provider = provider
        self._close_timeout_s = close_timeout_s
        self._tracer = provider.get_tracer("everstream")

    @contextmanager
    def request(self, scope: Scope) -> Iterator[_RequestSpan]:
        parent = _parent(Headers(scope=scope))
        if scope["type"] == "websocket":
            token = context.attach(parent)
            try:
                yield _RequestSpan(trace.INVALID_SPAN)  # which takes everything and keeps nothing
            finally:
                context.detach(token)
            return
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        attributes = {
            "http.request.method": method,
            "url.path": scope["path"][:MAX_PATH],
            "url.scheme": scope["scheme"],
        }
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        # A traceback may quote what the client sent: only the kind of an exception is kept.
        with trace.use_span(
            span, end_on_exit=True, record_exception=False, set_status_on_exception=False
        ):
            try:
                yield _RequestSpan(span)
            except Exception as error:
                _fail(span, type(error).__name__)
                raise
            finally:
                _describe(span, method, scope)

    def generation(self, request: Request, request_id: str) -> _GenerationSpan:
        attributes = {"everstream.tenant": request.owner, "everstream.request_id": request_id}
        if request.session is not None:
            attributes["everstream.session"] = request.session
        if request.sampling is not None:
            attributes["gen_ai.operation.name"] = "text_completion"
        name = "append" if request.sampling is None else "generate"
        return _GenerationSpan(self._tracer.start_span(name, attributes=attributes))

    def close(self) -> None:
        """Leaves a collector that does not answer in time to itself."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(self._close_timeout_s)


class _RequestSpan:
    def __init__(self, span: Span) -> None:
        self._span = span

    def responded(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            _fail(self._span, str(status))


class _GenerationSpan:
    def __init__(self, span: Span) -> None:
        self._span = span

    def finished(self, event: Finished, ttft_s: float | None) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attribute("gen_ai.usage.input_tokens", event.usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", event.usage.completion_tokens)
        if event.session is not None:
            self._span.set_attribute("everstream.session", event.session)
        if ttft_s is not None:
            self._span.set_attribute("everstream.ttft_s", ttft_s)
        if event.finish_reason is not None:
            self._span.set_attribute("gen_ai.response.finish_reasons", (event.finish_reason,))
        if event.finish_reason == "error":
            _fail(self._span, "error")
        self._span.end()

    def failed(self, error: RequestError) -> None:
        if self._span.is_recording():
            _fail(self._span, error.code)
            self._span.end()

    def left(self, why: Literal["detached", "migrated"]) -> None:
        if self._span.is_recording():
            self._span.set_attribute("everstream.left", why)
            self._span.end()


def _parent(headers: Headers) -> context.Context:
    """The context that the client's W3C ``traceparent`` names; empty without a valid one."""
    names = ("traceparent", "tracestate")
    given = {name: ",".join(headers.getlist(name)) for name in names if name in headers}
    return _PROPAGATOR.extract(given, context.Context())


def _describe(span: Span, method: str, scope: Scope) -> None:
    """What is known only after routing and authentication: both leave it in ``scope``."""
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
    owner = scope.get("state", {}).get("owner")
    if owner is not None:
        span.set_attribute("everstream.tenant", owner)


def _fail(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)
