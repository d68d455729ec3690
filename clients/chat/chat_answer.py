"""An answer by `/v1/responses`, which the server keeps until the client has all of it.

It is read on after a lost connection or a restart of the server; under the same key another
process gets it from its beginning.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from clients.chat.branch import Piece
from clients.python import ConnectionLost, EverstreamError
from clients.python.errors import error_of

PATH = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")
#: Of a server that comes back, or has no room at the moment.
PASSING = (408, 409, 429, 500, 502, 503, 504, 507)
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 5.0
#: A server that was away for so long stays away.
MAX_AWAY_S = 300.0


class ChatAnswer:
    """A streamed response. See `clients.chat.branch.Answer`.

    ``key`` names this answer: the server writes it once. ``may_be_known``: it was asked for before.
    """

    def __init__(
        self, http: httpx.Client, body: dict[str, Any], key: str, may_be_known: bool = False
    ) -> None:
        self._http, self._may_retry = http, may_be_known
        self._body = {**body, "stream": True, "background": True, "idempotency_key": key}
        self._id: str | None = None
        self._last = -1
        self._is_over = False
        self.num_tokens = self.position = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        if not isinstance(error, EverstreamError):
            with contextlib.suppress(httpx.HTTPError, EverstreamError):  # it expires then
                self._forget()

    def __iter__(self) -> Iterator[Piece]:
        away_s = 0.0
        delay_s = FIRST_DELAY_S
        while not self._is_over:
            try:
                for piece in self._pieces():
                    away_s, delay_s = 0.0, FIRST_DELAY_S
                    yield piece
            except EverstreamError as error:
                if error.code == "scope_missing" and self._is_stored:
                    # This key keeps nothing on the server: a lost answer is written again.
                    self._body |= {"store": False, "background": None, "idempotency_key": None}
                    continue
                is_gone = error.code == "response_not_found" or not self._is_stored
                if away_s >= MAX_AWAY_S or not self._may_pass(error, is_gone):
                    raise
                self._may_retry = True
                yield Piece(notice=f"{error}; trying again") if not away_s else Piece()
                if is_gone and self._id is not None:
                    self._id, self._last = None, -1
                    yield Piece(restarts=True)
                time.sleep(delay_s)
                away_s, delay_s = away_s + delay_s, min(MAX_DELAY_S, 2 * delay_s)

    @property
    def _is_stored(self) -> bool:
        return self._body.get("store") is not False

    def _may_pass(self, error: EverstreamError, is_gone: bool) -> bool:
        if isinstance(error, ConnectionLost):
            return True
        is_passing = error.status is None or error.status in PASSING
        return self._may_retry and error.code != "session_attached" and (is_gone or is_passing)

    def _pieces(self) -> Iterator[Piece]:
        """Those after the last event that was read, to the end. Raises `EverstreamError`."""
        place = f"{PATH}/{self._id}?stream=true&starting_after={self._last}"
        try:
            with (
                self._http.stream("POST", PATH, json=self._body)
                if self._id is None
                else self._http.stream("GET", place)
            ) as response:
                if response.status_code >= 400:
                    raise _error_of(response)
                for line in _lines(response):
                    if line.startswith("data: {"):
                        yield self._read(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise ConnectionLost(str(error) or type(error).__name__) from error
        if not self._is_over:
            raise ConnectionLost("the connection ended before the answer")

    def _read(self, event: dict[str, Any]) -> Piece:
        kind = event["type"]
        if kind == "error":
            raise EverstreamError(event["message"], event["code"])
        self._last, self._may_retry = event["sequence_number"], True
        if (response := event.get("response")) is not None:
            self._id = response["id"]
        if kind in ENDS:
            self._is_over = True
            self._count(event["response"])
        if kind == "response.failed":
            raise error_of(500, event["response"])
        if kind == "response.output_text.delta":
            return Piece(event["delta"])
        return Piece(thought=event["delta"] if kind == "response.reasoning_text.delta" else "")

    def _forget(self) -> None:
        """Ends it, and frees what the server keeps of it."""
        if not self._is_stored:
            return
        if self._id is None:
            answer = self._http.post(PATH, json={**self._body, "stream": False})
            if answer.status_code >= 400:
                raise _error_of(answer)
            self._id = answer.json()["id"]
        place = f"{PATH}/{self._id}"
        if not self._is_over:
            self._count(self._http.post(f"{place}/cancel").json())
        self._http.delete(place)

    def _count(self, response: dict[str, Any]) -> None:
        if (usage := response.get("usage")) is not None:
            self.num_tokens = usage["output_tokens"]
            self.position = usage["total_tokens"]


def _lines(response: httpx.Response) -> Iterator[str]:
    """Lines that end with a line feed: an event may have Unicode's other line ends in it."""
    rest = ""
    for text in response.iter_text():
        *lines, rest = (rest + text).split("\n")
        yield from lines


def _error_of(response: httpx.Response) -> EverstreamError:
    """The error that an answer stands for, read to its end."""
    try:
        body = json.loads(response.read())
    except ValueError:
        body = None
    return error_of(response.status_code, body, response.headers.get("Retry-After"))
