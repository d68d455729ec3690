"""Bounds on what a peer may make the server hold: the bytes of a body, and its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from server.api.errors import BodyTooLarge, RequestTimeout, UnsupportedEncoding

BODY_TIMEOUT_S = 8.0


class BodyLimit:
    """At most ``max_bytes`` in ``timeout_s``; ``of_paths`` take bodies of another size."""

    def __init__(
        self,
        max_bytes: int,
        timeout_s: float = BODY_TIMEOUT_S,
        of_paths: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._of_paths = of_paths or {}

    def bounded(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """``receive`` that raises `BodyTooLarge` or `RequestTimeout`; the app answers with them.

        Raises `UnsupportedEncoding` or `BodyTooLarge` itself for a body that its head announces.
        """
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise UnsupportedEncoding
        of_path = self._of_paths.get(scope["path"])
        max_bytes = self._max_bytes if of_path is None else of_path()
        if int(headers.get("content-length", "0")) > max_bytes:
            raise BodyTooLarge(max_bytes)

        deadline = asyncio.get_running_loop().time() + self._timeout_s
        num_bytes = 0
        complete = False

        async def bounded() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout from None
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > max_bytes:
                raise BodyTooLarge(max_bytes)
            return message

        return bounded
