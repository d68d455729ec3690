"""A reader over HTTP: `POST /v1/completions` as a stream, and `Last-Event-ID` to read on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks import sse
from benchmarks.sse import SseEvent
from tests.chaos.clients import ANSWER_S, CONNECT_S, RECEIVE_BYTES, SILENCE_S, Outcome, Place, World
from tests.chaos.record import Attachment
from tests.chaos.replicas import Replica
from tests.reliability.history import Event, event_of_frame

#: Of each connection.
NARROW = [(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)]


class SseReader:
    """``gap_s`` is the time that it takes over each event.

    A chunk of a completion has no token id: it is taken from ``expected``, with
    which text, place and end of the event are compared in the end.
    """

    def __init__(self, world: World, gap_s: float, expected: dict[int, Sequence[Event]]) -> None:
        self._world, self._gap_s, self._expected = world, gap_s, expected

    async def read(self, place: Place, replica: Replica, take_over: bool) -> Outcome:
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        base = f"http://{replica.url}"
        try:
            async with httpx.AsyncClient(
                base_url=base,
                timeout=timeout,
                transport=httpx.AsyncHTTPTransport(
                    verify=False, trust_env=False, socket_options=NARROW
                ),
            ) as client:
                request = self._request(client, place, take_over)
                asked_s = self._world.clock()
                response = await client.send(request, stream=True)
                try:
                    if response.status_code != 200:
                        said = await response.aread()
                        return self._refused(place, response.status_code, said, replica.incarnation)
                    reading = _Events(self._world, self._expected, place, replica, asked_s)
                    return await self._all(response, reading)
                finally:
                    await response.aclose()
        except TimeoutError:
            return "silent"
        except httpx.ReadTimeout:
            return "silent"
        except (httpx.HTTPError, OSError):
            return "broken"

    async def _all(self, response: httpx.Response, reading: _Events) -> Outcome:
        events = sse.read(response.aiter_bytes())
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    event = await anext(events, None)
                if event is None:
                    return reading.over()
                outcome = reading.take(event)
                if outcome is not None:
                    return outcome
                if self._gap_s:
                    await asyncio.sleep(self._gap_s)
        finally:
            await events.aclose()

    def _request(self, client: httpx.AsyncClient, place: Place, take_over: bool) -> httpx.Request:
        if place.is_begun:
            params = {"take_over": "true"} if take_over else {}
            cursor = {"Last-Event-ID": f"{place.epoch}:{place.last_seq}"}
            path = f"/v1/sessions/{place.session}/events"
            return client.build_request("GET", path, params=params, headers=cursor)
        where = {"keep": True} if place.session is None else {"session": place.session}
        body: dict[str, Any] = {
            **place.body,
            **where,
            "stream": True,
            "idempotency_key": place.key,
        }
        return client.build_request("POST", "/v1/completions", json=body)

    def _refused(self, place: Place, status: int, said: bytes, replica: str) -> Outcome:
        try:
            error = json.loads(said).get("error", {})
        except ValueError:
            self._world.wrong(place, "error", f"{replica} answered {status} {said[:80]!r}")
            return "broken"
        return self._world.refused(place, error, replica)


class _Events:
    """One answer's events, of either route."""

    def __init__(
        self,
        world: World,
        expected: dict[int, Sequence[Event]],
        place: Place,
        replica: Replica,
        asked_s: float,
    ) -> None:
        self._world, self._expected, self._place = world, expected, place
        self._replica, self._asked_s = replica.incarnation, asked_s
        self._attachment: Attachment | None = None
        self._named: str | None = None
        self._is_idle = False

    def take(self, event: SseEvent) -> Outcome | None:
        """An outcome where it is the last one that matters."""
        if event.data == sse.DONE:
            return None
        content = event.value
        if "error" in content:
            return self._failed(content["error"])
        return self._frame(content) if "type" in content else self._chunk(content, event.id)

    def over(self) -> Outcome:
        """The answer has ended without the end of the generation."""
        if self._is_idle:
            self._world.wrong(self._place, "lost end", "nothing runs, and no end has come")
        return "broken"

    def _failed(self, error: dict[str, Any]) -> Outcome:
        if error["code"] == "migrated":
            return self._world.migrated(self._place, self._attachment)
        return self._world.refused(self._place, error, self._replica)

    def _frame(self, frame: dict[str, Any]) -> Outcome | None:
        """Of ``GET /v1/sessions/{id}/events``."""
        world, place, kind = self._world, self._place, frame["type"]
        if kind == "reset":
            return world.reset(place, frame)
        if kind == "migrate":
            return world.migrated(place, self._attachment)
        if kind == "resumed":
            world.check_place(place, frame)
            self._attach(frame["session"], frame["epoch"], frame["last_seq"])
            self._is_idle = not frame["busy"]
            return None
        event = event_of_frame(frame)
        assert event is not None, frame
        return self._saw(event)

    def _chunk(self, chunk: dict[str, Any], cursor: str | None) -> Outcome | None:
        """Of a completion."""
        if cursor is None:
            self._named = chunk["session"]
            return None
        epoch, _, seq = cursor.rpartition(":")
        if self._attachment is None:
            # How far the log reached when it was asked is not said; it had what the client has.
            self._attach(str(self._named), epoch, self._place.last_seq)
        (choice,) = chunk["choices"]
        end = choice["finish_reason"]
        events = self._expected[self._place.script.index]
        token_id = events[int(seq) - 1].token_id if int(seq) <= len(events) else -1
        event = Event(int(seq), chunk["position"], None if end else token_id, choice["text"], end)
        return self._saw(event)

    def _attach(self, session: str, epoch: str, log_end: int) -> None:
        self._attachment = self._world.attached(
            self._place, self._replica, session, epoch, log_end, self._asked_s
        )

    def _saw(self, event: Event) -> Outcome | None:
        assert self._attachment is not None, event
        self._world.saw(self._place, self._attachment, event)
        return "finished" if event.finish_reason else None
