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
    def may_find(self, owner: str, tokens: Sequence[int]) -> bool: ...
    def may_name(self, owner: str, key: bytes) -> bool: ...


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
    may_find, hit = tier.may_find(owner, text), tier.find(owner, text)
    assert may_find or hit is None
    return (0, 0) if hit is None else (hit.num_tokens, int(hit.block.data[0]))


def named(tier: Tier, entry: Evicted, owner: str = "a") -> bool:
    """Whether ``entry`` is found by its key, as it was put."""
    may_name, prefix = (ask(owner, entry.prefix.key) for ask in (tier.may_name, tier.named))
    assert may_name or prefix is None
    if prefix is None:
        return False
    assert prefix._replace(block=entry.prefix.block) == entry.prefix
    assert bytes(prefix.block.data) == bytes(entry.prefix.block.data)
    return True
