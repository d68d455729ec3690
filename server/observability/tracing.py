"""Traces: a tracer and its spans, the tracer that does nothing, and the choice of one.

`server.observability.otel` exports spans; it is imported only where the configuration asks for it.
No span holds a prompt, a generated text or a key.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from starlette.types import Scope

from server.engine.types import Finished, Request
from server.errors import RequestError


class RequestSpan(Protocol):
    """One HTTP request, from its head to the end of its answer."""

    def responded(self, status: int) -> None:
        """The answer begins, with this status."""


class GenerationSpan(Protocol):
    """One request of the engine, from its submission. Its first end counts, no later one."""

    def finished(self, event: Finished, ttft_s: float | None) -> None:
        """It ended by itself; ``ttft_s`` is None where there was no token."""

    def failed(self, error: RequestError) -> None:
        """It was refused, or it is over here without a `Finished`."""

    def left(self, why: Literal["detached", "migrated"]) -> None:
        """It continues without the reader that it had here."""


class Tracer(Protocol):
    """Belongs to the event loop."""

    def request(self, scope: Scope) -> AbstractContextManager[RequestSpan]:
        """The span of an HTTP request, around all that serves it.

        Within it `generation` finds its parent. So it does within that of a WebSocket,
        which may last for days and so has no span of its own.
        """

    def generation(self, request: Request, request_id: str) -> GenerationSpan:
        """Begins the span of the one of ``request.ids`` that is given.

        The caller ends it, whatever comes of it.
        """

    def close(self) -> None:
        """Sends what waits to be sent, for a bounded time. May block."""


class _Off:
    """The tracer and its spans in one, which do nothing."""

    def request(self, scope: Scope) -> AbstractContextManager[RequestSpan]:
        return nullcontext(self)

    def generation(self, request: Request, request_id: str) -> GenerationSpan:
        return self

    def responded(self, status: int) -> None: ...
    def finished(self, event: Finished, ttft_s: float | None) -> None: ...
    def failed(self, error: RequestError) -> None: ...
    def left(self, why: Literal["detached", "migrated"]) -> None: ...
    def close(self) -> None: ...


_off = _Off()
OFF: Tracer = _off
#: For what has no span, among others that have one.
NO_SPAN: GenerationSpan = _off


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
