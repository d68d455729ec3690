from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from server.engine.prefix_cache import Evicted, PrefixCache, boundaries, keys
from server.engine.value import StateBlock

TORCH_GRID = (64, 16)


def block(mark: int = 0) -> StateBlock:
    return StateBlock(np.full(8, mark, np.uint8))


def filled(*prefixes: Sequence[int], max_entries: int = 8) -> PrefixCache:
    """A cache of "me" with these prefixes, in their order."""
    cache = PrefixCache(max_entries)
    for prefix in prefixes:
        cache.insert("me", prefix, block())
    return cache


def evicted_of(cache: PrefixCache) -> list[Evicted]:
    """What has made room, without what is new."""
    return [entry for entry in cache.take_evicted() if not entry.kept]


def found(cache: PrefixCache, tokens: Sequence[int], owner: str = "me") -> int:
    """Tokens saved, 0 for a miss."""
    hit = cache.lookup(owner, tokens)
    return 0 if hit is None else hit.num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, ()),
        (1, ()),
        (32, ()),
        (33, (32,)),
        (64, (63,)),
        (128, (127,)),
        (129, (128,)),
        (130, (128, 129)),
        (1000, (128, 256, 512, 999)),
    ],
)
def test_boundaries_are_powers_of_two_and_the_last_token_but_one(
    num_tokens: int, expected: tuple[int, ...]
) -> None:
    assert boundaries(num_tokens, ()) == expected


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (63, ()),
        (64, ()),
        (65, (64,)),
        (100, (64,)),
        (128, (64,)),
        (129, (128,)),
        (200, (128, 192)),
        (1000, (128, 256, 512, 960)),
    ],
)
def test_boundaries_on_a_grid_are_its_multiples(num_tokens: int, expected: tuple[int, ...]) -> None:
    assert boundaries(num_tokens, TORCH_GRID) == expected


@given(num_tokens=st.integers(0, 200_000), grid=st.sampled_from([(), (16,), (48,), TORCH_GRID]))
def test_boundaries_leave_a_token_to_feed(num_tokens: int, grid: tuple[int, ...]) -> None:
    found = boundaries(num_tokens, grid)
    assert list(found) == sorted(set(found))
    assert all(32 <= position < num_tokens for position in found)
    assert all(position % size == 0 for position in found for size in grid[:1])


def test_hit_has_the_block_that_was_inserted() -> None:
    cache = PrefixCache(4)
    cache.insert("me", (1, 2, 3), block(7))
    hit = cache.lookup("me", (1, 2, 3, 4))
    assert hit is not None
    assert hit.num_tokens == 3
    assert (hit.block.data == 7).all()


def test_the_longest_prefix_is_found() -> None:
    cache = filled((1, 2), (1, 2, 3, 4), (1, 2, 3))
    assert found(cache, (1, 2, 3, 4, 5)) == 4
    assert found(cache, (1, 2, 3, 9, 9)) == 3
    assert found(cache, (1, 2, 9)) == 2
    assert found(cache, (1, 9)) == 0


def test_a_longer_prefix_is_found_behind_a_length_of_others() -> None:
    """Lengths 2 and 3 exist, but for other tokens."""
    assert found(filled((8, 8), (8, 8, 8), (1, 2, 3, 4)), (1, 2, 3, 4, 5)) == 4


def test_one_token_is_left_to_feed() -> None:
    cache = filled((1, 2), (1, 2, 3))
    assert found(cache, (1, 2, 3)) == 2
    assert found(cache, (1, 2)) == 0
    assert found(cache, ()) == 0


def test_an_entry_of_the_same_length_and_other_tokens_is_no_hit() -> None:
    assert found(filled((1, 2, 3)), (1, 2, 4, 5)) == 0


def test_inserting_again_changes_nothing() -> None:
    cache = PrefixCache(2)
    cache.insert("me", (1, 2), block(1))
    cache.insert("me", (1, 2), block(2))
    hit = cache.lookup("me", (1, 2, 3))
    assert cache.num_entries == 1
    assert hit is not None
    assert (hit.block.data == 1).all()


def test_counts_hits_misses_and_saved_tokens() -> None:
    cache = filled((1, 2), (1, 2, 3))
    for tokens in ((1, 2, 3, 4), (1, 2, 4), (9, 9, 9)):
        cache.lookup("me", tokens)
    assert (cache.num_hits, cache.num_misses, cache.saved_tokens_total) == (2, 1, 5)


def test_owner_never_hits_anothers_entry() -> None:
    cache = filled((1, 2, 3))
    assert found(cache, (1, 2, 3, 4), "you") == 0
    assert found(cache, (1, 2, 3, 4)) == 3
    cache.insert("you", (1, 2), block())
    assert found(cache, (1, 2, 3, 4), "you") == 2


def test_owners_name_and_tokens_do_not_run_together() -> None:
    """Joined without care, both would be the bytes of "AAAAAAAA"."""
    letters = int.from_bytes(b"AAAA", "little")
    (short,) = keys("AAAA", (letters,), (1,))
    (shorter,) = keys("AAAAAAAA", (), (0,))
    assert short != shorter


def test_keys_are_those_of_each_prefix_alone() -> None:
    tokens = tuple(range(100, 165))
    alone = [next(keys("me", tokens[:length], (length,))) for length in (1, 63, 64, 65)]
    assert list(keys("me", tokens, (1, 63, 64, 65))) == alone
    assert len(set(alone)) == 4


def test_keys_stay_what_they_are() -> None:
    """Files may be named by them, so neither platform nor version may change them."""
    data = blake2b(b"me").digest() + b"\x01\x00\x00\x00\xff\xff\xff\x7f"
    assert list(keys("me", (1, 2**31 - 1), (2,))) == [blake2b(data, digest_size=32).digest()]


def test_the_entry_that_saves_least_makes_room() -> None:
    cache = filled((1, 1, 1, 1), (2, 2), (3, 3, 3), (4, 4, 4, 4, 4), max_entries=3)
    assert found(cache, (2, 2, 0)) == 0
    assert found(cache, (1, 1, 1, 1, 0)) == 4
    assert found(cache, (3, 3, 3, 0)) == 3
    assert cache.evicted_total == 1
    assert cache.num_entries == 3


def test_uses_count_as_much_as_tokens() -> None:
    cache = filled((1, 1, 1), (2, 2), max_entries=2)
    found(cache, (2, 2, 0))  # 2 x 2 > 3
    cache.insert("me", (3,), block())
    assert found(cache, (1, 1, 1, 0)) == 0
    assert found(cache, (2, 2, 0)) == 2


def test_among_equals_the_one_unused_for_longest_makes_room() -> None:
    cache = filled((1, 1), (2, 2), (3, 3), max_entries=3)
    for token in (1, 3, 2):
        found(cache, (token, token, 0))
    for token, victim in ((4, 1), (5, 3), (6, 2)):
        cache.insert("me", (token, token), block())
        assert found(cache, (victim, victim, 0)) == 0


def test_old_merit_fades() -> None:
    """Without the clock, ten uses would hold off every newcomer for ever."""
    cache = filled((1, 1), max_entries=2)
    for _ in range(9):
        found(cache, (1, 1, 0))
    for token in range(100, 111):
        cache.insert("me", (token, token), block())
    assert found(cache, (1, 1, 0)) == 0


def test_forgotten_owner_has_nothing_and_others_keep_theirs() -> None:
    cache = filled((1, 2), (1, 2, 3), max_entries=3)
    cache.insert("you", (1, 2), block())
    cache.forget("me")
    cache.forget("nobody")
    assert cache.num_entries == 1
    assert cache.evicted_total == 0
    assert found(cache, (1, 2, 3, 4)) == 0
    assert found(cache, (1, 2, 3, 4), "you") == 2


def test_room_of_a_forgotten_owner_is_free() -> None:
    cache = filled((1, 2), (3, 4), max_entries=3)
    cache.insert("you", (5, 6), block())
    cache.forget("me")
    for token in (7, 8):
        cache.insert("you", (token, token), block())
    assert cache.evicted_total == 0
    cache.insert("you", (9, 9), block())
    assert cache.evicted_total == 1
    assert found(cache, (5, 6, 0), "you") == 0


def test_evicted_entries_are_taken_once() -> None:
    cache = PrefixCache(1, max_evicted=8)
    cache.insert("me", (1, 2), block(1))
    cache.insert("you", (3, 4, 5), block(2))
    cache.insert("me", (6,), block(3))
    taken = evicted_of(cache)
    assert [(e.owner, e.num_tokens, int(e.block.data[0])) for e in taken] == [
        ("me", 2, 1),
        ("you", 3, 2),
    ]
    assert [e.key for e in taken] == [*keys("me", (1, 2), (2,)), *keys("you", (3, 4, 5), (3,))]
    assert evicted_of(cache) == []


def test_evicted_entries_that_nobody_takes_are_bounded() -> None:
    cache = PrefixCache(1, max_evicted=2)
    for token in range(5):
        cache.insert("me", (token,), block(token))
    assert [int(e.block.data[0]) for e in evicted_of(cache)] == [2, 3]
    unasked = PrefixCache(1)
    for token in range(5):
        unasked.insert("me", (token,), block())
    assert unasked.take_evicted() == []
    assert unasked.evicted_total == 4


def test_forgetting_reaches_what_was_evicted() -> None:
    cache = PrefixCache(1, max_evicted=8)
    cache.insert("me", (1,), block())
    cache.insert("you", (2,), block())
    cache.insert("you", (3,), block())
    cache.forget("me")
    assert [e.owner for e in evicted_of(cache)] == ["you"]


def test_an_evicted_entry_comes_back_by_insert() -> None:
    cache = PrefixCache(1, max_evicted=1)
    cache.insert("me", (1, 2), block(1))
    cache.insert("me", (3, 4, 5), block(2))
    (evicted,) = evicted_of(cache)
    cache.insert("me", (1, 2), evicted.block)
    hit = cache.lookup("me", (1, 2, 3))
    assert hit is not None
    assert hit.block is evicted.block


def test_new_entries_are_offered_once_and_before_they_are_evicted() -> None:
    cache = PrefixCache(1, max_evicted=8)
    for tokens, mark in (((1, 2), 1), ((3, 4, 5), 2), ((3, 4, 5), 3)):
        cache.insert("me", tokens, block(mark))
    cache.lookup("me", (3, 4, 5, 6))
    taken = cache.take_evicted()
    assert [(e.kept, e.num_tokens, int(e.block.data[0])) for e in taken] == [
        (True, 2, 1),
        (True, 3, 2),
        (False, 2, 1),
    ]
    assert [e.key for e in taken[:2]] == [*keys("me", (1, 2), (2,)), *keys("me", (3, 4, 5), (3,))]
    assert cache.take_evicted() == []


def test_new_entries_that_nobody_takes_are_bounded() -> None:
    cache = PrefixCache(8, max_evicted=2)
    for token in range(5):
        cache.insert("me", (token,), block(token))
    assert [int(e.block.data[0]) for e in cache.take_evicted()] == [3, 4]


def test_forgetting_reaches_what_is_offered() -> None:
    cache = PrefixCache(8, max_evicted=8)
    cache.insert("me", (1,), block())
    cache.insert("you", (2,), block())
    cache.forget("me")
    assert [e.owner for e in cache.take_evicted()] == ["you"]


@dataclass
class Known:
    """What the model knows of an entry."""

    mark: int
    priority: int
    last_use: int
    num_uses: int = 1


Prefix = tuple[str, tuple[int, ...]]

OWNERS = st.sampled_from(["me", "you"])
#: So few that prefixes meet, and that the cache is always too small.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


class Cache(RuleBasedStateMachine):
    """Beside a dict that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(4, max_evicted=100)
        self.known: dict[Prefix, Known] = {}
        self.evicted: list[tuple[str, int, int]] = []
        self.clock = self.count = self.num_evicted = 0
        self.hits: list[int] = []
        self.num_misses = 0

    @rule(owner=OWNERS, tokens=TOKENS)
    def insert(self, owner: str, tokens: tuple[int, ...]) -> None:
        self.count += 1
        mark = self.count % 256
        self.cache.insert(owner, tokens, block(mark))
        if (owner, tokens) in self.known:
            return
        if len(self.known) == 4:
            worst = min(self.known, key=lambda k: (self.known[k].priority, self.known[k].last_use))
            gone = self.known.pop(worst)
            self.clock = gone.priority
            self.num_evicted += 1
            self.evicted.append((worst[0], len(worst[1]), gone.mark))
        self.known[owner, tokens] = Known(mark, self.clock + len(tokens), self.count)

    @rule(owner=OWNERS, tokens=TOKENS)
    def lookup(self, owner: str, tokens: tuple[int, ...]) -> None:
        self.count += 1
        hit = self.cache.lookup(owner, tokens)
        for length in range(len(tokens) - 1, 0, -1):
            entry = self.known.get((owner, tokens[:length]))
            if entry is not None:
                entry.num_uses += 1
                entry.priority = self.clock + entry.num_uses * length
                entry.last_use = self.count
                assert hit is not None
                assert (hit.num_tokens, int(hit.block.data[0])) == (length, entry.mark)
                self.hits.append(length)
                return
        assert hit is None
        self.num_misses += 1

    @rule(owner=OWNERS)
    def forget(self, owner: str) -> None:
        self.cache.forget(owner)
        self.known = {prefix: e for prefix, e in self.known.items() if prefix[0] != owner}
        self.evicted = [entry for entry in self.evicted if entry[0] != owner]

    @rule()
    def take_evicted(self) -> None:
        taken = [(e.owner, e.num_tokens, int(e.block.data[0])) for e in evicted_of(self.cache)]
        assert taken == self.evicted
        self.evicted = []

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.cache.num_entries == len(self.known) <= 4
        assert self.cache.num_hits == len(self.hits)
        assert self.cache.saved_tokens_total == sum(self.hits)
        assert self.cache.num_misses == self.num_misses
        assert self.cache.evicted_total == self.num_evicted


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
test_cache_machine = Cache.TestCase
