"""The answer where a request fails by our own mistake, made inside of what marks answers."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.middleware.refuse import error_response
from server.errors import InternalFailure


class AnswerFailures:
    """Answers with 500 where ``app`` raises before it has answered; the error goes on.

    The framework answers outside of all middleware: without a request id, and so that a
    page of an allowed origin cannot read it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_answered = False

        async def watched(message: Message) -> None:
            nonlocal has_answered
            has_answered = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if not has_answered:
                failure = InternalFailure("the server failed; it has logged why")
                await error_response(failure)(scope, receive, send)
            raise
