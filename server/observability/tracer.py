"""Opens the tracer that the configuration asks for; imports OpenTelemetry only where it does."""

from __future__ import annotations

from server.observability.tracing import OFF, Tracer

EXTRA = "otel"


class TracingError(Exception):
    """Traces cannot be sent as asked for."""


def open_tracer(endpoint: str | None, version: str) -> Tracer:
    """A tracer that sends to ``endpoint``, the base URL of an OTLP collector; `OFF` for None.

    ``version`` is the server's. Raises `TracingError`.
    """
    if endpoint is None:
        return OFF
    if not endpoint.startswith(("http://", "https://")):
        raise TracingError("--otel-endpoint: must be a URL that begins with http:// or https://")
    try:
        from server.observability.otel import connect
    except ImportError as error:
        raise TracingError(
            f"--otel-endpoint needs OpenTelemetry: pip install 'everstream[{EXTRA}]'"
        ) from error
    return connect(endpoint, version)
