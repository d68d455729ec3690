"""What the soak's clients speak: raw HTTP and WebSockets, checked against the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect

MAX_PROBLEMS = 50
TIMEOUT_S = 120.0

#: What a busy server may say, by its code.
REFUSALS = {"capacity_exhausted": 503, "queue_full": 429}

ENDS = ("finished", "appended", "created", "deleted", "error")

Frame = dict[str, Any]


class Refused(Exception):
    """The server had no room and said so as it should."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Broken(Exception):
    """The server did what the protocol does not allow."""


def expect(condition: bool, what: str, seen: object) -> None:
    """Raises `Broken` unless ``condition`` holds."""
    if not condition:
        raise Broken(f"{what}: {str(seen)[:500]}")


@dataclass
class Tally:
    """What was done and what went wrong."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def problem(self, where: str, error: BaseException) -> None:
        self.problems.append(f"{where}: {type(error).__name__}: {error}")

    @property
    def hopeless(self) -> bool:
        """Whether to continue would only repeat the same problem."""
        return len(self.problems) >= MAX_PROBLEMS


@dataclass(frozen=True)
class Reference:
    """A request whose tokens are known from when the server had nothing else to do."""

    prompt: str
    sampling: dict[str, Any]
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class World:
    """The server under test, and the books kept about it."""

    url: str
    http: httpx.AsyncClient
    tally: Tally
    references: Sequence[Reference]

    async def call(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        """The JSON of an answer of ``status``. Raises `Refused` or `Broken`."""
        answer = await self.http.request(method, path, **options)
        self.tally.statuses[answer.status_code] += 1
        body = answer.json()
        if answer.status_code in REFUSALS.values() and answer.status_code != status:
            expect(answer.headers.get("retry-after", "").isdigit(), "Retry-After", answer.headers)
            raise Refused(checked_refusal(answer.status_code, body))
        expect(answer.status_code == status, f"{method} {path} is not {status}", answer.text)
        return body

    async def generate(self, **body: Any) -> Any:
        """The answer of ``POST /v1/completions``."""
        answer = await self.call("POST", "/v1/completions", json=body)
        self.tally.num_tokens += answer["usage"]["completion_tokens"]
        return answer

    @contextlib.asynccontextmanager
    async def socket(self, close: bool = True) -> AsyncIterator[Socket]:
        """A WebSocket; closed at the end of the block, or cut off without a word."""
        connection = await connect(
            self.url.replace("http", "ws", 1) + "/v1/stream",
            compression=None,
            max_size=None,
            ping_interval=None,
            proxy=None,
        )
        try:
            yield Socket(connection, self.tally)
        except BaseException:
            connection.transport.abort()
            raise
        if close:
            await connection.close()
        else:
            connection.transport.abort()
        await connection.wait_closed()


class Socket:
    """One WebSocket. Every token that comes is counted."""

    def __init__(self, connection: ClientConnection, tally: Tally) -> None:
        self.connection = connection
        self._tally = tally

    async def send(self, type: str, request_id: str, **fields: object) -> None:
        await self.connection.send(json.dumps({"type": type, "request_id": request_id, **fields}))

    async def frame(self) -> Frame:
        """The next frame, whatever it is."""
        frame: Frame = json.loads(await self.connection.recv())
        self._tally.num_tokens += frame["type"] == "token"
        return frame

    async def tokens(self, count: int) -> list[Frame]:
        """Frames of the only live request up to its token number ``count``, or to its end.

        Raises `Refused` or `Broken`.
        """
        frames: list[Frame] = []
        while count > 0:
            frames.append(await self.frame())
            count -= frames[-1]["type"] == "token"
            if frames[-1]["type"] in ENDS:
                raise_if_error(frames[-1])
                break
        return frames

    async def ends(self, *request_ids: str) -> dict[str, list[Frame]]:
        """All frames of these requests, each up to its end."""
        frames: dict[str, list[Frame]] = {request_id: [] for request_id in request_ids}
        while any(not seen or seen[-1]["type"] not in ENDS for seen in frames.values()):
            frame = await self.frame()
            expect(frame["request_id"] in frames, "a frame of another request", frame)
            frames[frame["request_id"]].append(frame)
        return frames

    async def answer(self, request_id: str) -> list[Frame]:
        """The frames of the only live request. Raises `Refused` or `Broken`."""
        frames = (await self.ends(request_id))[request_id]
        raise_if_error(frames[-1])
        return frames

    async def generate(self, request_id: str, **fields: object) -> Stream:
        """A whole generation, checked."""
        await self.send("generate", request_id, **fields)
        return checked_stream(await self.answer(request_id))


@dataclass(frozen=True)
class Stream:
    """A generation that ended."""

    tokens: tuple[int, ...]
    text: str
    session: str | None
    finish_reason: str
    position: int


def checked_stream(frames: list[Frame]) -> Stream:
    """The frames of one generation; raises `Broken` where their numbers do not add up."""
    *body, end = frames
    expect(end["type"] == "finished", "no end", end)
    expect(end["finish_reason"] in ("stop", "length", "cancelled"), "finish_reason", end)
    tokens = [frame for frame in body if frame["type"] == "token"]
    usage = end["usage"]
    expect(usage["completion_tokens"] == len(tokens), "completion_tokens", end)
    expect(usage["total_tokens"] == usage["prompt_tokens"] + len(tokens), "total_tokens", end)
    if body:
        start = body[0]
        expect(start["type"] == "started" and len(body) == len(tokens) + 1, "order", body[:3])
        first = start["position"] + usage["prompt_tokens"]
        positions = [frame["position"] for frame in tokens]
        expect(positions == list(range(first, first + len(tokens))), "position", positions)
        expect(end["position"] == first + len(tokens), "position of the end", end)
    seqs = [frame["seq"] for frame in (*tokens, end)]
    expect(seqs == list(range(end["seq"] - len(tokens), end["seq"] + 1)), "seq", seqs)
    return Stream(
        tokens=tuple(frame["token_id"] for frame in tokens),
        text="".join(frame["text"] for frame in (*tokens, end)),
        session=end["session"],
        finish_reason=end["finish_reason"],
        position=end["position"],
    )


def raise_if_error(frame: Frame) -> None:
    """Raises `Refused` for an error that says "no room", `Broken` for any other."""
    if frame["type"] == "error":
        raise Refused(checked_refusal(frame["status"], frame))


def checked_refusal(status: int, body: Any) -> str:
    """The code of an error that says "no room"; raises `Broken` for any other error."""
    code = body["error"]["code"]
    expect(REFUSALS.get(code) == status, "an error that no request provoked", body)
    return str(code)


@contextlib.asynccontextmanager
async def open_world(
    url: str, tally: Tally, references: Sequence[Reference] = ()
) -> AsyncIterator[World]:
    """The world with its HTTP connections, which are closed at the end of the block."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=TIMEOUT_S, trust_env=False
    ) as http:
        yield World(url, http, tally, references)


@contextlib.asynccontextmanager
async def open_raw(url: str, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which ``sent`` was written; cut off at the end of the block."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(sent)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()
