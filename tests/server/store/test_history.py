"""Which snapshots are kept, and how far a log is read."""

from __future__ import annotations

import pytest

from server.engine.session import Accepted, Entry
from server.store.rows import total_tokens
from server.store.table_store import past, superfluous
from tests.server.store.records import Writer, text_after


def kept_after(num_saves: int, interval: int, max_snapshots: int) -> list[int]:
    """Lengths that are kept where each save is followed by a clearing."""
    lengths = [0]
    for save in range(1, num_saves + 1):
        lengths.append(save * interval)
        dropped = superfluous(lengths, max_snapshots)
        lengths = [length for index, length in enumerate(lengths) if index not in dropped]
    return lengths


@pytest.mark.parametrize("num_saves", [1, 2, 3, 10, 100, 1000])
def test_the_two_newest_and_the_oldest_are_kept(num_saves: int) -> None:
    lengths = kept_after(num_saves, 256, 12)
    assert lengths[0] == 0
    assert lengths[-2:] == [256 * (num_saves - 1), 256 * num_saves]
    assert len(lengths) <= 12


@pytest.mark.parametrize("num_saves", [10, 50, 100, 500])
def test_any_point_of_the_past_is_near_a_snapshot(num_saves: int) -> None:
    lengths = kept_after(num_saves, 1, 24)
    for at in range(num_saves + 1):
        base = max(length for length in lengths if length <= at)
        assert at - base <= 2 * (num_saves - at) + 2


def test_a_few_are_all_kept() -> None:
    assert superfluous([0, 10, 20], 12) == set()
    assert superfluous([5, 5, 5], 12) == set()


def test_lengths_may_fall() -> None:
    """Rows of format 1 within a prompt have its length, and later ones of it a shorter text."""
    assert superfluous([0, 4000, 4000, 3074, 3073], 12) <= {1, 2}


def test_a_log_is_read_to_the_end_without_a_limit() -> None:
    writer = Writer()
    writer.opened()
    entries: list[Entry] = [entry for _, entry in writer.turn(5)]
    assert past(entries, 0, None) == entries


@pytest.mark.parametrize("at", range(12))
def test_a_log_is_read_past_a_length_that_stays(at: int) -> None:
    """The prompt that was cut short while it was fed is not mistaken for text."""
    writer = Writer()
    writer.opened()
    log: list[Entry] = [entry for _, entry in writer.turn(3)]
    _, cancelled = writer.accepted((9,) * 5)
    assert isinstance(cancelled, Accepted)
    del writer.text[7:]
    log += [cancelled, writer.finished("cancelled")[1]]
    log += [entry for _, entry in writer.turn(3)]
    reached = text_after(0, past(log, 0, at))
    assert reached[:at] == writer.text[:at]
    assert len(reached) >= min(at + 1, len(writer.text))


def test_tokens_of_prompts_count() -> None:
    writer = Writer()
    writer.opened()
    assert total_tokens([entry for _, entry in writer.turn(5, tokens=(1, 2, 3))]) == 9
