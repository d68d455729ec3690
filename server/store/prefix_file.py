"""A prompt's state as a safetensors file, for the prefix cache's second tiers."""

from __future__ import annotations

import orjson

from server.engine.prefix import Prefix
from server.engine.value import StateBlock
from server.store.base import Identity
from server.store.errors import SnapshotBroken
from server.store.files import Chunk
from server.store.state_file import seal, unseal

FORMAT = "everstream-prefix-1"


def encode_prefix(prefix: Prefix, identity: Identity) -> list[Chunk]:
    """The file of a prompt's state, in parts."""
    about = {
        "format": FORMAT,
        **identity.labels,
        "num_tokens": str(prefix.num_tokens),
        "position": str(prefix.position),
        "recent": orjson.dumps(prefix.recent).decode(),
    }
    return seal(about, prefix.block.data)


def decode_prefix(file: bytes, identity: Identity, key: bytes, num_tokens: int) -> Prefix:
    """The prefix of this ``key``, sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = unseal(file, FORMAT, identity)
    if about["num_tokens"] != str(num_tokens):
        raise SnapshotBroken(f"it is the state after {about['num_tokens']} tokens")
    recent = tuple(orjson.loads(about["recent"]))
    return Prefix(key, num_tokens, StateBlock(data), int(about["position"]), recent)
