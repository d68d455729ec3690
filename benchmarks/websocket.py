"""The client's side of RFC 6455 without a socket: frames in bytes, and bytes in frames.

One codec for the raw clients of the tests and the benchmarks. It writes whatever it is told to,
also what the RFC forbids, and it reads strictly: what a server may not send raises an error.
Masks are zero unless one is given, so the payload is on the wire as it is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
CONTROL = frozenset({CLOSE, PING, PONG})

NO_MASK = bytes(4)


def handshake(path: str = "/v1/stream", **headers: str | None) -> bytes:
    """An opening handshake. A header given as None is left out; underscores become dashes."""
    all_headers: dict[str, str | None] = {
        "host": "127.0.0.1",
        "upgrade": "websocket",
        "connection": "Upgrade",
        "sec-websocket-version": "13",
        "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}\r\n" for name, value in all_headers.items() if value is not None]
    return f"GET {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    rsv: int = 0,
    mask: bytes | None = NO_MASK,
    length: int | None = None,
    length_bytes: int | None = None,
) -> bytes:
    """One frame (section 5.2). ``mask`` None sends it bare, as a server would.

    ``length`` is what the header claims, if not the truth; ``length_bytes`` (0, 2
    or 8) the size of the extended length, if not the smallest.
    """
    size = len(payload) if length is None else length
    if length_bytes is None:
        length_bytes = 0 if size < 126 else 2 if size < 1 << 16 else 8
    short = {0: size, 2: 126, 8: 127}[length_bytes]
    head = bytes((fin << 7 | rsv << 4 | opcode, (mask is not None) << 7 | short))
    extended = size.to_bytes(length_bytes) if length_bytes else b""
    if mask is None:
        return head + extended + payload
    masked = payload
    if mask != NO_MASK:
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
    return head + extended + mask + masked


def text(value: object) -> bytes:
    """A text frame with ``value`` as JSON."""
    return frame(TEXT, json.dumps(value).encode())


def closing(code: int = 1000, reason: bytes = b"") -> bytes:
    """A close frame."""
    return frame(CLOSE, struct.pack("!H", code) + reason)


@dataclass(frozen=True, slots=True)
class Received:
    """A frame of the server."""

    opcode: int
    payload: bytes

    @property
    def json(self) -> Any:
        assert self.opcode == TEXT, self
        return json.loads(self.payload)

    @property
    def code(self) -> int:
        """The code of a close frame."""
        assert self.opcode == CLOSE, self
        return int(struct.unpack("!H", self.payload[:2])[0])


class FrameParser:
    """What a server sends on one connection: the answer to the handshake, then frames.

    ``head`` is the answer, empty until all of it has been fed. Only one of status
    101 is followed by frames. Without ``awaits_head`` it begins with a frame.
    """

    def __init__(self, awaits_head: bool = True) -> None:
        self.head = b""
        self._awaits_head = awaits_head
        self._rest = b""

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    @property
    def headers(self) -> Mapping[str, str]:
        """The answer's fields by lower-case name."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    def feed(self, data: bytes) -> list[Received]:
        """The frames that end in ``data``. Raises `AssertionError` at what no server may send."""
        data = self._rest + data
        if self._awaits_head:
            head, end, after = data.partition(b"\r\n\r\n")
            if not end:
                self._rest = data
                return []
            self.head, data, self._awaits_head = head, after, False
        if self.head and self.status != 101:
            return []
        frames, start = [], 0
        while (found := _frame_at(data, start)) is not None:
            received, start = found
            frames.append(received)
        self._rest = data[start:]
        return frames


def _frame_at(data: bytes, start: int) -> tuple[Received, int] | None:
    """The frame that begins at ``start`` and where it ends; None where it is incomplete."""
    body = start + 2
    if len(data) < body:
        return None
    first, size = data[start], data[start + 1]
    opcode = first & 0x0F
    assert first & 0xF0 == 0x80, f"fragmented or reserved bits: {first:#x}"
    assert size < 0x80, "a server's frame is never masked"
    assert opcode in (TEXT, CLOSE, PING, PONG), opcode
    if size >= 126:
        assert opcode not in CONTROL, size
        body += 2 if size == 126 else 8
        size = int.from_bytes(data[start + 2 : body])
    if len(data) < body + size:
        return None
    return Received(opcode, data[body : body + size]), body + size
