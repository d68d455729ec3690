"""A state as a file: safetensors with one tensor, and strings that say what it is.

The header is read only as `pack` writes it, byte for byte, and the checksum
covers the rest, so that a file with any byte altered is refused.
"""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from server.engine.value import StateBlock
from server.store.base import Identity
from server.store.errors import SnapshotBroken, SnapshotMismatch
from server.store.files import Chunk

FORMAT = "everstream-state-1"
_TENSOR = "state"
#: The names of all labels.
LABELS = tuple(field.name for field in dataclasses.fields(Identity))
#: No header of ours is longer, whatever a file says about itself.
_MAX_HEADER_BYTES = 64 << 20


def encode_state(state: StateBlock, identity: Identity, position: int) -> list[Chunk]:
    """The file of a state that has seen ``position`` tokens, in parts."""
    return seal({"format": FORMAT, **identity.labels, "position": str(position)}, state.data)


def decode_state(file: bytes, identity: Identity, position: int) -> StateBlock:
    """The state, sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = unseal(file, FORMAT, identity)
    if about.get("position") != str(position):
        raise SnapshotBroken(f"it is the state after {about.get('position')} tokens")
    return StateBlock(data)


def seal(about: Mapping[str, str], data: memoryview) -> list[Chunk]:
    """A file of a tensor and what it is ``about``, with a checksum of both, in parts."""
    return pack({**about, "checksum": checksum(about, data)}, data)


def unseal(file: bytes, form: str, identity: Identity) -> tuple[dict[str, str], memoryview]:
    """What `seal` was given, the tensor sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written or of another ``form``, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = unpack(file)
    if about.get("format") != form:
        raise SnapshotBroken(f"its format is not {form}")
    check_sum(about, data)
    check_identity(about, identity)
    return about, data


def check_identity(about: Mapping[str, Any], identity: Identity, what: str = "session") -> None:
    """Raises `SnapshotMismatch`, naming the first field of ``what`` that differs."""
    ours = identity.labels
    for name in LABELS:
        here, there = ours.get(name), about.get(name)
        if there != here:
            raise SnapshotMismatch(
                f"the {what} belongs to another {name}: {str(there or 'none')[:64]},"
                f" and this server has {here or 'none'}",
                what,
            )


def checksum(about: Mapping[str, str], data: Chunk) -> str:
    """Covers the strings of a header and the tensor, but not the checksum itself."""
    digest = blake2b(orjson.dumps({**about, "checksum": ""}), digest_size=32)
    digest.update(data)
    return digest.hexdigest()


def check_sum(about: Mapping[str, str], data: Chunk) -> None:
    """Raises `SnapshotBroken`."""
    if not hmac.compare_digest(checksum(about, data).encode(), about.get("checksum", "").encode()):
        raise SnapshotBroken("its checksum is wrong")


def pack(about: Mapping[str, str], data: memoryview) -> list[Chunk]:
    """A safetensors file of one tensor of bytes, in parts."""
    tensor = {"dtype": "U8", "shape": [data.nbytes], "data_offsets": [0, data.nbytes]}
    header = orjson.dumps({"__metadata__": about, _TENSOR: tensor})
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little"), header, data]


def unpack(file: bytes) -> tuple[dict[str, str], memoryview]:
    """The strings and the tensor of a file that `pack` has made. Raises `SnapshotBroken`."""
    size = int.from_bytes(file[:8], "little")
    if len(file) < 8 or size > min(len(file) - 8, _MAX_HEADER_BYTES):
        raise SnapshotBroken("its header is incomplete")
    data = memoryview(file)[8 + size :]
    try:
        about = orjson.loads(file[8 : 8 + size])["__metadata__"]
    except (ValueError, TypeError, KeyError) as error:
        raise SnapshotBroken("its header is not JSON of ours") from error
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise SnapshotBroken("its header is not strings")
    if b"".join(pack(about, data)[:2]) != file[: 8 + size]:
        raise SnapshotBroken("its header is not as it was written")
    return about, data
