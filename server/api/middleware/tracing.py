"""The span of each request of the API, where traces are asked for."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.observability.tracing import OFF, Tracer

# Pages, probes and scrapes are not worth a span.
PREFIX = "/v1/"


def traced(app: ASGIApp, tracer: Tracer) -> ASGIApp:
    """``app`` with a span around each request, or ``app`` itself where ``tracer`` is off."""
    return app if tracer is OFF else Traced(app, tracer)


class Traced:
    """Pure ASGI, and the first to see a request, so that refusals have a span as well."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        with self._tracer.request(scope) as span:

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.responded(message["status"])
                await send(message)

            await self._app(scope, receive, watched)
