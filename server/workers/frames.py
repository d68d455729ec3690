"""What goes over the pipes of a worker process: JSON after its length in four bytes."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")


def frame(value: object) -> bytes:
    """``value`` as the other side reads it. A text may hold surrogates.

    Not in ASCII, whose escapes the event loop would spend most of its time on.
    """
    body = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    return LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """The next frame's value, or None at the end."""
    head = stream.read(LENGTH.size)
    return json.loads(stream.read(*LENGTH.unpack(head))) if len(head) == LENGTH.size else None


def write_frame(stream: BinaryIO, value: object) -> None:
    """Writes a frame that the other side can read at once."""
    stream.write(frame(value))
    stream.flush()
