"""States of beginnings of a text, for the tests of the prefix cache's second tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from server.engine.prefixes import Evicted, Prefix, keys
from server.engine.session import StateBlock
from server.store.base import Identity

STATE_BYTES = 64
IDENTITY = Identity("model", "tokenizer", "native", "float32", STATE_BYTES, "layout")
TEXT = tuple(range(300))


class Tier(Protocol):
    def find(self, owner: str, tokens: Sequence[int]) -> Prefix | None: ...
    def named(self, owner: str, key: bytes) -> Prefix | None: ...


def new(
    length: int,
    fill: int = 1,
    owner: str = "a",
    text: tuple[int, ...] = TEXT,
    kept: bool = False,
) -> Evicted:
    """The state after ``length`` tokens, whose bytes are ``fill``."""
    (key,) = keys(owner, text[:length], (length,))
    block = StateBlock(np.full(STATE_BYTES, fill, np.uint8))
    return Evicted(owner, Prefix(key, length, block, length + 7, text[length - 4 : length]), kept)


def found(tier: Tier, owner: str = "a", text: tuple[int, ...] = TEXT) -> tuple[int, int]:
    """Tokens and fill byte of what is found; zeros for nothing."""
    hit = tier.find(owner, text)
    return (0, 0) if hit is None else (hit.num_tokens, int(hit.block.data[0]))


def named(tier: Tier, entry: Evicted, owner: str = "a") -> bool:
    """Whether ``entry`` is found by its key, as it was put."""
    prefix = tier.named(owner, entry.prefix.key)
    if prefix is None:
        return False
    assert prefix._replace(block=entry.prefix.block) == entry.prefix
    assert bytes(prefix.block.data) == bytes(entry.prefix.block.data)
    return True
