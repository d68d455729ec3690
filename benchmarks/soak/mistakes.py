"""Visits of clients that violate the protocol: each mistake and the status that it must get."""

from __future__ import annotations

import json
from random import Random

from websockets.exceptions import ConnectionClosed

from benchmarks.soak.wire import World, expect

#: One byte more than `--max-body-bytes` and `--max-message-bytes` are by default.
OVERSIZED_BYTES = (1 << 20) + 1

BAD_BODIES: tuple[tuple[str, str, object, int], ...] = (
    ("POST", "/v1/completions", b"{", 400),
    ("POST", "/v1/completions", b"\xff\xfe", 400),
    ("POST", "/v1/completions", [], 400),
    ("POST", "/v1/completions", {}, 400),
    ("POST", "/v1/completions", {"prompt": ""}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": "3"}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": -2}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": True}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "temperature": 3}, 400),
    ("POST", "/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400),
    ("POST", "/v1/completions", {"prompt": "x", "top_p": -1}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "seed": -2}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "stop": [""]}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "unheard_of": 1}, 400),
    ("POST", "/v1/completions", {"prompt": [2**31 - 1]}, 400),
    ("POST", "/v1/completions", {"prompt": [-1]}, 400),
    ("POST", "/v1/completions", {"prompt": "x", "model": "another"}, 404),
    ("POST", "/v1/completions", {"prompt": "x", "session": "sess_none"}, 404),
    ("POST", "/v1/completions", b" " * OVERSIZED_BYTES, 413),
    ("POST", "/v1/sessions/sess_none/append", {"text": "x"}, 404),
    ("POST", "/v1/sessions/sess_none/append", {}, 400),
    ("GET", "/v1/sessions/sess_none", None, 404),
    ("DELETE", "/v1/sessions/sess_none", None, 404),
    ("GET", "/v1/nothing", None, 404),
    ("GET", "/v1/completions", None, 405),
)

BAD_FRAMES: tuple[tuple[str | bytes, int], ...] = (
    ("{", 400),
    ("[]", 400),
    (b"\x00\x01", 400),
    ('{"type": "dance", "request_id": "x"}', 400),
    ('{"type": "generate"}', 400),
    ('{"type": "generate", "request_id": "x", "prompt": 5}', 400),
    ('{"type": "generate", "request_id": "x", "prompt": "a", "top_k": -2}', 400),
    ('{"type": "generate", "request_id": "x", "prompt": "a", "colour": 1}', 400),
    ('{"type": "append", "request_id": "x", "session": "sess_none", "text": "a"}', 404),
    ('{"type": "delete", "request_id": "x", "session": "sess_none"}', 404),
)


async def bad_body(world: World, rng: Random) -> None:
    """A bad request gets the right error."""
    method, path, body, status = rng.choice(BAD_BODIES)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    answer = await world.call(method, path, status, content=content)
    expect(bool(answer["error"]["code"] and answer["error"]["message"]), "no error", answer)


async def bad_frame(world: World, rng: Random) -> None:
    """Each bad frame gets an error, and the socket stays open."""
    async with world.socket() as socket:
        for _ in range(rng.randint(1, 4)):
            sent, status = rng.choice(BAD_FRAMES)
            await socket.connection.send(sent)
            frame = await socket.frame()
            expect(frame["type"] == "error" and frame["status"] == status, f"to {sent!r}", frame)
        await socket.generate("good", prompt="Once", max_tokens=2)


async def oversized_frame(world: World, rng: Random) -> None:
    """More than a message may have: the socket closes with 1009."""
    async with world.socket() as socket:
        try:
            await socket.send("generate", "x", prompt="x" * OVERSIZED_BYTES)
            await socket.frame()
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd else None
            expect(code == 1009, "close code is not 1009", closed)
        else:
            expect(False, "an oversized frame was taken", OVERSIZED_BYTES)
