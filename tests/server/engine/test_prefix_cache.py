from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from server.engine.prefixes import Evicted, Prefix, PrefixCache, boundaries, keys
from server.engine.session import StateBlock

TORCH_GRID = (64, 16)


def block(mark: int = 0) -> StateBlock:
    return StateBlock(np.full(8, mark, np.uint8))


def insert(
    cache: PrefixCache,
    owner: str,
    tokens: tuple[int, ...],
    block: StateBlock,
    continues: int = 0,
) -> bool:
    """The state after all of ``tokens``, computed from the one after ``continues`` of them."""
    *earlier, key = keys(owner, tokens, (continues, len(tokens)) if continues else (len(tokens),))
    prefix = Prefix(key, len(tokens), block, len(tokens), tokens)
    return cache.insert(owner, prefix, earlier[0] if earlier else None)


def evicted_of(cache: PrefixCache) -> list[Evicted]:
    """What has made room, without what is new."""
    return [entry for entry in cache.take_evicted() if not entry.kept]


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


@pytest.mark.parametrize(
    ("asked", "grid", "expected"),
    [
        ((250,), (), (128, 250, 256)),
        ((190, 290), (), (128, 190, 256, 290)),
        ((190,), (), (128, 190, 256, 299)),
        ((300, 400, 20), (), (128, 256, 299)),
        ((290,), TORCH_GRID, (128, 256)),
        ((250,), TORCH_GRID, (128, 192, 256)),
    ],
)
def test_boundaries_that_are_asked_for_replace_the_last_token_but_one_near_them(
    asked: tuple[int, ...], grid: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    num_tokens = 300 if 250 not in asked else 270
    assert boundaries(num_tokens, grid, 0, asked) == expected


@pytest.mark.parametrize("num_turns", [1, 2])
def test_longer_entry_takes_the_place_of_the_one_that_it_alone_continues(num_turns: int) -> None:
    """The other entry is worth less, but nothing shows that its text is over."""
    cache = PrefixCache(2, max_evicted=8)
    insert(cache, "me", (7,), block())
    insert(cache, "me", (1, 2), block())
    for _ in range(num_turns):
        cache.lookup("me", (1, 2, 3, 4))
    insert(cache, "me", (1, 2, 3), block(), continues=2)
    assert [entry.prefix.num_tokens for entry in evicted_of(cache)] == [2 if num_turns == 1 else 1]


@given(num_tokens=st.integers(0, 200_000), grid=st.sampled_from([(), (16,), (48,), TORCH_GRID]))
def test_boundaries_leave_a_token_to_feed(num_tokens: int, grid: tuple[int, ...]) -> None:
    found = boundaries(num_tokens, grid)
    assert list(found) == sorted(set(found))
    assert all(32 <= position < num_tokens for position in found)
    assert all(position % size == 0 for position in found for size in grid[:1])


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


def test_key_depends_on_the_named_state_that_the_text_begins_with() -> None:
    found = [next(keys("me", (1, 2), (2,), origin)) for origin in ("", "one", "two")]
    assert len(set(found)) == 3


@given(num_tokens=st.integers(1, 2000), start=st.integers(0, 200))
def test_boundaries_on_a_grid_count_from_the_first_token_of_the_session(
    num_tokens: int, start: int
) -> None:
    found = boundaries(num_tokens, TORCH_GRID, start)
    assert all((start + count) % TORCH_GRID[0] == 0 for count in found)
    assert len(found) > 0 or num_tokens < 2 * TORCH_GRID[0]


def test_keys_stay_what_they_are() -> None:
    """Files may be named by them, so neither platform nor version may change them."""
    data = blake2b(b"me").digest() + b"\x01\x00\x00\x00\xff\xff\xff\x7f"
    assert list(keys("me", (1, 2**31 - 1), (2,))) == [blake2b(data, digest_size=32).digest()]


def test_untaken_evicted_entries_are_bounded() -> None:
    cache = PrefixCache(1, max_evicted=2)
    for token in range(5):
        insert(cache, "me", (token,), block(token))
    assert [int(e.prefix.block.data[0]) for e in evicted_of(cache)] == [2, 3]
    unasked = PrefixCache(1)
    for token in range(5):
        insert(unasked, "me", (token,), block())
    assert unasked.take_evicted() == []


def test_an_evicted_entry_comes_back_by_insert() -> None:
    cache = PrefixCache(1, max_evicted=1)
    insert(cache, "me", (1, 2), block(1))
    insert(cache, "me", (3, 4, 5), block(2))
    (evicted,) = evicted_of(cache)
    insert(cache, "me", (1, 2), evicted.prefix.block)
    hit = cache.lookup("me", (1, 2, 3))
    assert hit is not None
    assert hit.block is evicted.prefix.block


def test_new_entries_are_offered_once_and_before_they_are_evicted() -> None:
    cache = PrefixCache(1, max_evicted=8)
    for tokens, mark in (((1, 2), 1), ((3, 4, 5), 2), ((3, 4, 5), 3)):
        insert(cache, "me", tokens, block(mark))
    cache.lookup("me", (3, 4, 5, 6))
    taken = cache.take_evicted()
    assert [(e.kept, e.prefix.num_tokens, int(e.prefix.block.data[0])) for e in taken] == [
        (True, 2, 1),
        (True, 3, 2),
        (False, 2, 1),
    ]
    assert [e.prefix.key for e in taken[:2]] == [
        *keys("me", (1, 2), (2,)),
        *keys("me", (3, 4, 5), (3,)),
    ]
    assert cache.take_evicted() == []


def test_entry_is_offered_at_the_use_that_was_set_and_no_later_one() -> None:
    cache = PrefixCache(8, max_evicted=8, min_uses=3)
    insert(cache, "me", (1, 2), block())
    for num_offered in (0, 1, 0):
        cache.lookup("me", (1, 2, 3))
        assert len(cache.take_evicted()) == num_offered


def test_entry_that_was_never_offered_makes_room_in_silence() -> None:
    cache = PrefixCache(1, max_evicted=8, min_uses=3)
    insert(cache, "me", (1, 2), block())
    insert(cache, "me", (3, 4), block())
    assert cache.take_evicted() == []


def test_entry_with_a_handle_is_offered_at_once() -> None:
    cache = PrefixCache(1, max_evicted=8, min_uses=3)
    insert(cache, "me", (1, 2), block())
    (key,) = keys("me", (1, 2), (2,))
    for _ in range(2):
        cache.offer("me", key)
    assert [(e.prefix.key, e.kept) for e in cache.take_evicted()] == [(key, True)]


def test_entry_of_the_second_tier_is_not_offered_again_but_told_when_it_leaves() -> None:
    cache = PrefixCache(1, max_evicted=8)
    (key,) = keys("me", (1, 2), (2,))
    cache.insert("me", Prefix(key, 2, block(), 2, (1, 2)), is_stored=True)
    cache.lookup("me", (1, 2, 3))
    insert(cache, "me", (3, 4, 5), block())
    assert [(e.prefix.num_tokens, e.kept) for e in cache.take_evicted()] == [(3, True), (2, False)]


def test_most_useful_entries_are_those_of_the_highest_priority() -> None:
    cache = PrefixCache(8, max_evicted=8, min_uses=3)
    texts = [tuple(range(first, first + length)) for first, length in ((0, 130), (1, 129), (2, 40))]
    for text in texts:
        insert(cache, "me", text, block())
    cache.lookup("me", (*texts[1], 7))
    assert [e.prefix.num_tokens for e in cache.most_useful()] == [129, 130]
    cache.offer("me", next(keys("me", texts[2], (40,))))
    assert [e.prefix.num_tokens for e in cache.most_useful()] == [129, 130, 40]


def test_untaken_new_entries_are_bounded() -> None:
    cache = PrefixCache(8, max_evicted=2)
    for token in range(5):
        insert(cache, "me", (token,), block(token))
    assert [int(e.prefix.block.data[0]) for e in cache.take_evicted()] == [3, 4]


@dataclass
class Known:
    """What the model knows of an entry."""

    mark: int
    priority: int
    last_use: int
    num_uses: int = 1


Beginning = tuple[str, tuple[int, ...]]

OWNERS = st.sampled_from(["me", "you"])
#: Beginnings of three texts: one is often that of another, and the cache is always too small.
TOKENS = st.builds(
    lambda text, length: text[:length],
    st.sampled_from([(0, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1, 1), (1, 0, 1, 0, 1, 0)]),
    st.integers(1, 6),
)


class Cache(RuleBasedStateMachine):
    """Compared with a dict that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(4, max_evicted=100)
        self.known: dict[Beginning, Known] = {}
        self.evicted: list[tuple[str, bytes, int, int]] = []
        self.clock = self.count = 0
        self.hits: list[int] = []
        self.num_misses = 0

    @rule(owner=OWNERS, tokens=TOKENS, continues=st.integers(0, 5))
    def insert(self, owner: str, tokens: tuple[int, ...], continues: int) -> None:
        self.count += 1
        mark = self.count % 256
        continues = min(continues, len(tokens) - 1)
        insert(self.cache, owner, tokens, block(mark), continues)
        if (owner, tokens) in self.known:
            return
        if len(self.known) == 4:
            worst = min(self.known, key=lambda k: (self.known[k].priority, self.known[k].last_use))
            earlier = self.known.get((owner, tokens[:continues]))
            if earlier is not None and earlier.num_uses <= 2:
                worst = owner, tokens[:continues]
                self.known.pop(worst)
                gone = earlier
            else:
                gone = self.known.pop(worst)
                self.clock = gone.priority
            (key,) = keys(*worst, (len(worst[1]),))
            self.evicted.append((worst[0], key, len(worst[1]), gone.mark))
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

    @rule(owner=OWNERS, tokens=TOKENS)
    def find(self, owner: str, tokens: tuple[int, ...]) -> None:
        self.count += 1
        (key,) = keys(owner, tokens, (len(tokens),))
        assert self.cache.find("you" if owner == "me" else "me", key) is None
        self.num_misses += 1
        found, entry = self.cache.find(owner, key), self.known.get((owner, tokens))
        if entry is None:
            assert found is None
            self.num_misses += 1
            return
        entry.num_uses += 1
        entry.priority = self.clock + entry.num_uses * len(tokens)
        entry.last_use = self.count
        assert found is not None
        assert (found.num_tokens, int(found.block.data[0])) == (len(tokens), entry.mark)
        self.hits.append(len(tokens))

    @rule()
    def take_evicted(self) -> None:
        taken = evicted_of(self.cache)
        found = [
            (e.owner, e.prefix.key, e.prefix.num_tokens, int(e.prefix.block.data[0])) for e in taken
        ]
        assert found == self.evicted
        self.evicted = []

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.cache.num_entries == len(self.known) <= 4
        assert self.cache.num_hits == len(self.hits)
        assert self.cache.saved_tokens_total == sum(self.hits)
        assert self.cache.num_misses == self.num_misses


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
test_cache_machine = Cache.TestCase
