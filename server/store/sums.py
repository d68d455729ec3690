"""Checksums of rows, so that a byte that a disk has altered is noticed and never sent.

Each is a CRC-32 over the columns that a session's history depends on.
"""

from __future__ import annotations

from zlib import crc32

import orjson


def row_sum(*columns: str | int | None, data: bytes = b"") -> int:
    """Of ``columns``, and of ``data`` after them."""
    return crc32(data, crc32(orjson.dumps(columns)))


def is_altered(stored: int | None, *columns: str | int | None, data: bytes = b"") -> bool:
    """Whether a row is not as it was written with the sum ``stored``."""
    return stored != row_sum(*columns, data=data)


def sealed(text: str) -> str:
    """``text`` after its own checksum."""
    return f"{crc32(text.encode()):08x}{text}"


def unsealed(text: str) -> str | None:
    """What `sealed` was given; None where it was altered."""
    return text[8:] if sealed(text[8:]) == text else None
