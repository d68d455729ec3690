"""Clients of kept sessions that outlive their server: they notice a break and resume.

Each has a name for its work (an idempotency key), so that it also gets its
session where the server died before it could say which one that is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from benchmarks import sse
from model.bundled_models import DEFAULT_MODEL
from model.checkpoint import load_checkpoint
from server.models.backend import open_backend
from server.models.storage import identity_of
from server.store.base import Store
from server.store.sqlite.store import open_store
from tests.chosen_model import served_model
from tests.reliability.history import Event, History, Log, Reader, event_of_entry, event_of_frame
from tests.reliability.odometer import TIMEOUT_S, Odometer
from tests.reliability.servers import ServerProcess, socket_to
from tests.server.harness import checked

Frame = dict[str, Any]
#: How one connection ended: by a frame, by the server's close, or without a word.
End = Literal["finished", "error", "reset", "migrate", "broken"]
Backend = Literal["native", "torch"]
LAST = ("finished", "error", "reset", "migrate")

PROMPT = "Who lives in the hollow tree?"
#: With it a generation has as many tokens as it may.
SAMPLING: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
#: So many tokens last longer than any test: a generation ends when it is cancelled.
ENDLESS = 10**6


class KeptStream:
    """One kept generation, read to its end over as many connections as that takes.

    ``body`` is what the ``generate`` message asks for. ``frames`` is all that has
    come, ``ends`` how each connection ended, ``close_code`` the last one's;
    ``has_asked`` whether the last one has sent its question.
    """

    def __init__(
        self, name: str, history: History, odometer: Odometer | None = None, **body: Any
    ) -> None:
        self.name, self.body = name, body
        self.reader: Reader | None = None
        self.epoch = ""
        self.frames: list[Frame] = []
        self.ends: list[End] = []
        self.close_code: int | None = None
        self.has_asked = False
        self._socket: ClientConnection | None = None
        self._history, self._odometer = history, odometer or Odometer()

    @property
    def session(self) -> str:
        assert self.reader is not None, f"{self.name} has not started"
        return self.reader.session

    @property
    def last_seq(self) -> int:
        return 0 if self.reader is None else self.reader.last_seq

    @property
    def is_finished(self) -> bool:
        return bool(self.ends) and self.ends[-1] == "finished"

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens that it has, in order."""
        return [frame["token_id"] for frame in self.frames if frame["type"] == "token"]

    @property
    def resumed(self) -> list[Frame]:
        """What its resumes were answered with, where they were not refused."""
        return [frame for frame in self.frames if frame["type"] == "resumed"]

    async def run(
        self,
        url: str,
        holder: str = "server",
        take_over: bool = False,
        headers: Mapping[str, str] | None = None,
        num_tokens: int | None = None,
    ) -> End:
        """Begins, or continues where it was, until the generation or the connection ends.

        With ``num_tokens`` it cancels once so many have come.
        """
        end: End = "broken"
        self.close_code, self.has_asked = None, False
        if not self.tokens:
            self._odometer.wait_for(self.name)
        try:
            async with socket_of(url, **(headers or {})) as socket:
                self._socket = socket
                await ask(socket, **self._question(take_over))
                self.has_asked = True
                end = await self._read(socket, holder, num_tokens)
                if end == "migrate":
                    await socket.wait_closed()
                    self.close_code = socket.close_code
        except (ConnectionClosed, InvalidHandshake, OSError) as error:
            if isinstance(error, ConnectionClosed) and error.rcvd is not None:
                self.close_code = error.rcvd.code
        await self._odometer.leave(self.name)
        self.ends.append(end)
        return end

    async def cancel(self) -> None:
        """Ends the generation that it reads: its `run` returns "finished"."""
        assert self._socket is not None, f"{self.name} has not started"
        await ask(self._socket, type="cancel", request_id=self.name)

    def _question(self, take_over: bool) -> Frame:
        if self.reader is None:
            return {
                "type": "generate",
                "request_id": self.name,
                "keep": True,
                "idempotency_key": self.name,
                **self.body,
            }
        place = place_of(self, self.last_seq)
        question = {"type": "resume", "request_id": self.name, **place}
        return {**question, "take_over": True} if take_over else question

    async def _read(self, socket: ClientConnection, holder: str, num_tokens: int | None) -> End:
        num_read = 0
        async for message in socket:
            frame = checked(message)
            self.frames.append(frame)
            if frame["type"] in ("started", "resumed"):
                self._attach(frame, holder)
            elif frame["type"] == "token":
                assert self.reader is not None, frame
                self.reader.saw_frame(frame)
                if not await self._odometer.add(self.name):
                    return "broken"
                num_read += 1
                if num_read == num_tokens:
                    await self.cancel()
            elif frame["type"] in LAST:
                if frame["type"] == "finished":
                    assert self.reader is not None, frame
                    self.reader.saw_frame(frame)
                return frame["type"]  # type: ignore[no-any-return]
        return "broken"

    def _attach(self, frame: Frame, holder: str) -> None:
        if self.reader is None:
            self.reader = self._history.reader(self.name, frame["session"])
        self.epoch = frame["epoch"]
        self.reader.attach(self.epoch, frame.get("seq", 0), holder)


async def run_all(streams: Iterable[KeptStream], url: str, **options: Any) -> list[End]:
    """Every stream that has not finished, side by side, until each connection has ended.

    ``options`` are those of `KeptStream.run`.
    """
    async with asyncio.timeout(TIMEOUT_S):
        unfinished = [stream for stream in streams if not stream.is_finished]
        return await asyncio.gather(*(stream.run(url, **options) for stream in unfinished))


def kept_streams(
    number: int, history: History, odometer: Odometer | None = None, **body: Any
) -> list[KeptStream]:
    """So many, which differ in their seeds; of `PROMPT` where ``body`` has no other one."""
    body = {"prompt": PROMPT, **SAMPLING, **body}
    return [KeptStream(f"c{seed}", history, odometer, seed=seed, **body) for seed in range(number)]


def twin_of(stream: KeptStream, history: History) -> KeptStream:
    """Another client that has seen just as much of the same session."""
    twin = KeptStream(f"{stream.name} again", history, **stream.body)
    twin.epoch = stream.epoch
    twin.reader = history.reader(twin.name, stream.session)
    twin.reader.attach(stream.epoch, stream.last_seq)
    return twin


# Single questions


async def ask(socket: ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def answer(socket: ClientConnection) -> Frame:
    """The next frame. Raises `TimeoutError`."""
    async with asyncio.timeout(TIMEOUT_S):
        return checked(await socket.recv())


async def answer_of(socket: ClientConnection, *types: str) -> Frame:
    """The next frame of one of ``types``, or an error."""
    while (frame := await answer(socket))["type"] not in (*types, "error"):
        pass
    return frame


def place_of(stream: KeptStream, last_seq: int = 0) -> Frame:
    """What a ``resume`` of its session says: that so much was seen of it."""
    return {"session": stream.session, "epoch": stream.epoch, "last_seq": last_seq}


def events_of(frames: Iterable[Frame]) -> list[Frame]:
    """Those with a number."""
    return [frame for frame in frames if frame["type"] in ("token", "finished")]


async def rest_of(socket: ClientConnection) -> list[Frame]:
    """Everything until the server closes."""
    frames = []
    try:
        while True:
            frames.append(json.loads(await socket.recv()))
    except ConnectionClosed:
        return frames


def socket_of(url: str, **headers: str) -> connect:
    """A socket with these headers; see `socket_to`."""
    return socket_to(url, additional_headers=headers)


def client_of(url: str) -> httpx.AsyncClient:
    """A connection for each request: an old one may be closed just when it is used again."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False, verify=False
    )


async def events_over_http(url: str, session: str, starting_after: int = 0) -> list[Frame]:
    """The frames of ``GET /v1/sessions/{id}/events``, which ends where the session is idle."""
    path = f"/v1/sessions/{session}/events"
    async with client_of(url) as client:
        response = await client.get(path, params={"starting_after": starting_after})
    assert response.status_code == 200, response.text
    return sse.values_of(response.text)


# The log, by two ways


async def log_over_http(url: str, sessions: Iterable[str]) -> Log:
    """What a server tells of its log."""
    log: dict[tuple[str, int | str], Sequence[Event]] = {}
    for session in sessions:
        first, *frames = await events_over_http(url, session)
        assert first["type"] == "resumed", first
        events = [event for frame in frames if (event := event_of_frame(frame)) is not None]
        log[session, first["epoch"]] = events
    return log


def log_of_store(folder: Path, model: Path | None = None) -> Log:
    """What is in a store that no process has open any more."""
    store = opened_store(folder, model)
    try:
        return {
            (one.id, f"{store.store_id}-{one.epoch}"): [
                event_of_entry(entry) for entry in store.read(one.id, one.owner, 0, 1 << 40)
            ]
            for one in store.list(None, None, 1 << 20)
        }
    finally:
        store.close()


def opened_store(folder: Path, model: Path | None = None, backend: Backend = "native") -> Store:
    """The store that a server of ``model`` (None: the bundled one) has left in ``folder``."""
    checkpoint = load_checkpoint(model or DEFAULT_MODEL)
    return open_store(folder, identity_of(checkpoint, open_backend(checkpoint, backend)))


# Servers


def tiny_server(folder: Path, *flags: object, **options: Any) -> ServerProcess:
    """A server of `served_model` with its store in ``folder``; it is not started."""
    model = served_model(folder / "model")
    return ServerProcess("--model", model, "--store", folder / "store", *flags, **options)
