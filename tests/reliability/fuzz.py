"""A seeded fuzzer of the WebSocket protocol that knows what each of its inputs deserves.

A script is a list of `Step`s: bytes, and what must come of them. All but the last
are allowed, in whatever odd shape, and the connection must live through them; the
last may break a rule, and then the socket closes with one of its codes. So the
fuzzer finds not only crashes but wrong verdicts. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.websocket import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, closing, frame
from tests.reliability.raw_websocket import Ended, RawWebSocket, opened

MAX_STEPS = 12
PROTOCOL_ERROR, INVALID_DATA, TOO_BIG = 1002, 1007, 1009
NAMES = ("type", "request_id", "prompt", "session", "max_tokens", "seed", "stop", "text", "zzz")
TYPES = ("create", "generate", "append", "cancel", "delete", "dance", 5, None)
ANSWERS = ("created", "deleted", "appended", "error", "started", "token", "finished")


@dataclass(frozen=True)
class Step:
    """Bytes, and the codes of which the socket must close with one; none where it must live."""

    what: str
    data: bytes
    codes: frozenset[int] = frozenset()


def script(seed: int) -> list[Step]:
    """What one client sends."""
    rng = Random(seed)
    steps = [rng.choice(ALLOWED)(rng) for _ in range(rng.randint(1, MAX_STEPS))]
    if rng.random() < 0.7:
        steps.append(rng.choice(FORBIDDEN)(rng))
    return steps


async def visit(port: int, seed: int) -> None:
    """Plays a script; raises `AssertionError` that names the seed where the server is wrong."""
    steps = script(seed)
    rng = Random(seed)
    try:
        async with opened(port) as client:
            for step in steps:
                await _send(client, step.data, rng)
            if steps[-1].codes:
                code = await client.close_code()
                assert code in steps[-1].codes, f"closed with {code}"
            elif rng.random() < 0.8:
                await _assert_alive(client)
    except (AssertionError, Ended, OSError, TimeoutError, ValueError) as error:
        story = "\n".join(f"  {step.what}: {step.data[:80]!r}" for step in steps)
        raise AssertionError(f"seed {seed}: {error!r}\n{story}") from error


async def _send(client: RawWebSocket, data: bytes, rng: Random) -> None:
    """In one piece, in several, or byte by byte: it must not matter where TCP cuts."""
    kind = rng.random()
    if kind < 0.5 or len(data) > 5000:
        await client.send(data)
    elif kind < 0.9:
        cut = rng.randrange(len(data) + 1)
        await client.send(data[:cut])
        await client.send(data[cut:])
    else:
        await client.send_bytewise(data[:500])
        await client.send(data[500:])


async def _assert_alive(client: RawWebSocket) -> None:
    """A ping is answered, after well-formed messages only."""
    await client.send(frame(PING, b"alive?"))
    while True:
        received = await client.receive()
        if received.opcode == PONG and received.payload == b"alive?":
            return
        assert received.opcode in (TEXT, PONG), received
        if received.opcode == TEXT:
            assert received.json["type"] in ANSWERS, received


# What is allowed


def ping(rng: Random) -> Step:
    return Step("ping", frame(PING, rng.randbytes(rng.randrange(126)), mask=_mask(rng)))


def pong(rng: Random) -> Step:
    return Step("pong nobody asked for", frame(PONG, rng.randbytes(rng.randrange(126))))


def message(rng: Random) -> Step:
    return Step("message", frame(TEXT, _json(rng), mask=_mask(rng)))


def odd_length(rng: Random) -> Step:
    payload = _json(rng)[:125]
    text = payload.decode(errors="ignore").encode()
    return Step("length longer than needed", frame(TEXT, text, length_bytes=rng.choice((2, 8))))


def no_json(rng: Random) -> Step:
    data = "".join(rng.choice('{}[]":,0123456789\\ué€𐍈\0 \n') for _ in range(rng.randrange(60)))
    return Step("text that is no JSON", frame(TEXT, data.encode(), mask=_mask(rng)))


def binary(rng: Random) -> Step:
    return Step("binary", frame(BINARY, rng.randbytes(rng.randrange(300))))


def fragments(rng: Random) -> Step:
    """A message in pieces, with control frames between them."""
    data = _json(rng)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    sent = b""
    for index, piece in enumerate(pieces):
        opcode = CONTINUATION if index else TEXT
        sent += frame(opcode, piece, fin=index == len(pieces) - 1, mask=_mask(rng))
        if rng.random() < 0.3 and index < len(pieces) - 1:
            sent += frame(rng.choice((PING, PONG)), rng.randbytes(rng.randrange(5)))
    return Step("fragments", sent)


ALLOWED: tuple[Callable[[Random], Step], ...] = (
    *(ping, pong, message, message, message, odd_length, no_json, binary, fragments, fragments),
)

# What is not


def forbidden(what: str, *codes: int, start: bytes = b"") -> Callable[..., Any]:
    """Makes a step of a function that makes bytes."""

    def wrap(make: Callable[[Random], bytes]) -> Callable[[Random], Step]:
        return lambda rng: Step(what, start + make(rng), frozenset(codes))

    return wrap


@forbidden("reserved bits", PROTOCOL_ERROR)
def reserved_bits(rng: Random) -> bytes:
    return frame(rng.choice((TEXT, BINARY, PING)), b"{}", rsv=rng.randint(1, 7))


@forbidden("reserved opcode", PROTOCOL_ERROR)
def reserved_opcode(rng: Random) -> bytes:
    return frame(rng.choice((3, 4, 5, 6, 7, 11, 12, 13, 14, 15)), b"{}")


@forbidden("no mask", PROTOCOL_ERROR)
def bare(rng: Random) -> bytes:
    return frame(rng.choice((TEXT, BINARY, PING, CLOSE)), b"", mask=None)


@forbidden("control frame in fragments", PROTOCOL_ERROR)
def control_fragment(rng: Random) -> bytes:
    return frame(rng.choice((PING, PONG, CLOSE)), b"", fin=False)


@forbidden("long control frame", PROTOCOL_ERROR)
def long_control(rng: Random) -> bytes:
    return frame(rng.choice((PING, PONG)), bytes(rng.randint(126, 2000)))


@forbidden("continuation of nothing", PROTOCOL_ERROR)
def lone_continuation(rng: Random) -> bytes:
    return frame(CONTINUATION, b"x", fin=rng.random() < 0.5)


@forbidden("message within a message", PROTOCOL_ERROR)
def nested(rng: Random) -> bytes:
    return frame(TEXT, b"{", fin=False) + frame(rng.choice((TEXT, BINARY)), b"{}")


@forbidden("bad close", PROTOCOL_ERROR)
def bad_close(rng: Random) -> bytes:
    code = rng.choice((0, 1, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65535))
    return frame(CLOSE, b"x") if rng.random() < 0.2 else closing(code)


@forbidden("text that is not UTF-8", INVALID_DATA)
def bad_text(rng: Random) -> bytes:
    bad = rng.choice(
        (b"\xff", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82")
    )
    if rng.random() < 0.5:
        return frame(TEXT, b'{"a": "' + bad)
    return frame(TEXT, b'{"a": "' + bad[:1], fin=False) + frame(CONTINUATION, bad[1:] + b"\xff")


@forbidden("too big", TOO_BIG)
def too_big(rng: Random) -> bytes:
    length = rng.choice(((1 << 20) + 1, 1 << 30, 1 << 40, (1 << 63) - 1))
    return frame(rng.choice((TEXT, BINARY)), rng.randbytes(rng.randrange(50)), length=length)


@forbidden("close", 1000, 1001, 3000, 4999)
def close(rng: Random) -> bytes:
    return closing(rng.choice((1000, 1001, 3000, 4999)), b"bye" * rng.randrange(40))


FORBIDDEN: tuple[Callable[[Random], Step], ...] = (
    *(reserved_bits, reserved_opcode, bare, control_fragment, long_control, lone_continuation),
    *(nested, bad_close, bad_text, too_big, close),
)

# Pieces


def _mask(rng: Random) -> bytes:
    return rng.randbytes(4)


def _json(rng: Random) -> bytes:
    """A message of the protocol: a right one, or with anything anywhere."""
    made: dict[str, Any] = {"type": rng.choice(TYPES), "request_id": f"r{rng.randrange(5)}"}
    for name in rng.sample(NAMES, rng.randrange(4)):
        made[name] = _value(rng, 0)
    if rng.random() < 0.5:
        made |= {"type": "generate", "prompt": "hi", "max_tokens": rng.randint(1, 20)}
    return json.dumps(made, ensure_ascii=rng.random() < 0.5).encode()


def _value(rng: Random, depth: int) -> Any:
    plain = (None, True, 0, -1, 2**63, 0.5, 1e300, "", "hi", "é€𐍈", "\0", "END", "x" * 200)
    if depth < 3 and rng.random() < 0.3:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 3 and rng.random() < 0.2:
        return {rng.choice(NAMES): _value(rng, depth + 1)}
    return rng.choice(plain)
