"""The prefix cache's files, on a real folder."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from server.store.base import DiskFiles, Identity
from server.store.sqlite.files import (
    DEFAULT_PREFIX_BYTES,
    LENT_S,
    PrefixFiles,
    default_bytes,
)
from server.store.states import encode_prefix
from tests.server.store.prefixes import IDENTITY, TEXT, found, named, new

MIB = 1 << 20
#: Of the file of any state here.
FILE_BYTES = len(b"".join(encode_prefix(new(128).prefix, IDENTITY)))


def files(path: Path, num: int = 8, identity: Identity = IDENTITY) -> PrefixFiles:
    return PrefixFiles(path, DiskFiles(), identity, num * FILE_BYTES)


def test_longest_beginning_is_found(tmp_path: Path) -> None:
    tier = files(tmp_path)
    tier.put([new(128, 1), new(256, 2), new(300, 3)])
    assert found(tier) == (256, 2)  # all 300 would leave nothing to feed
    assert found(files(tmp_path), text=TEXT[:200]) == (128, 1)


def test_entry_outlives_the_process(tmp_path: Path) -> None:
    files(tmp_path).put([new(128, 1)])
    assert found(files(tmp_path)) == (128, 1)


def test_another_owner_or_text_finds_nothing(tmp_path: Path) -> None:
    tier = files(tmp_path)
    tier.put([new(128, 1)])
    assert found(tier, owner="b") == (0, 0)
    assert found(tier, text=(7, *TEXT[1:])) == (0, 0)


def test_what_was_given_out_is_in_memory_until_it_is_put_back(tmp_path: Path) -> None:
    tier = files(tmp_path)
    tier.put([new(128, 1)])
    assert found(tier) == (128, 1)
    assert found(tier) == (0, 0)
    tier.put([new(128, 1)])
    assert found(tier) == (128, 1)


def test_state_is_found_by_its_key_alone_after_a_restart(tmp_path: Path) -> None:
    files(tmp_path).put([new(128, 1), new(256, 2)])
    tier = files(tmp_path)
    assert not named(tier, new(128, 1), owner="b")
    assert not named(tier, new(200, 1))
    assert named(tier, new(128, 1))
    assert not named(tier, new(128, 1)), "it is in memory now"
    assert found(tier) == (256, 2)


def test_least_recently_used_is_evicted_first(tmp_path: Path) -> None:
    tier = files(tmp_path, num=2)
    tier.put([new(128, 1), new(256, 2)])
    assert found(tier, text=TEXT[:200]) == (128, 1)
    tier.put([new(128, 1), new(290, 3)])
    assert len(tier) == 2
    assert len(list(tmp_path.glob("*/*"))) == 2
    assert found(files(tmp_path), text=TEXT[:280]) == (128, 1)


def test_room_is_that_of_the_files_whoever_wrote_them(tmp_path: Path) -> None:
    """Not of what the numbers of tokens say: a state that continues another one is larger."""
    files(tmp_path).put([new(128, 1), new(256, 2)])
    sizes = [file.stat().st_size for file in tmp_path.glob("*/*")]
    assert sizes == [FILE_BYTES] * 2
    tier = PrefixFiles(tmp_path, DiskFiles(), IDENTITY, 3 * FILE_BYTES - 1)
    tier.put([new(290, 3)])
    assert len(tier) == 2


@pytest.mark.parametrize("place", [0, 200, -1])
def test_broken_file_is_removed_and_was_never_there(tmp_path: Path, place: int) -> None:
    files(tmp_path).put([new(128, 1), new(256, 2)])
    (long,) = tmp_path.glob("*/*-256.*")
    data = bytearray(long.read_bytes())
    data[place] ^= 1
    long.write_bytes(data)
    assert found(files(tmp_path)) == (128, 1)
    assert not long.exists()


def test_states_of_another_model_are_not_used(tmp_path: Path) -> None:
    files(tmp_path).put([new(128, 1)])
    assert found(files(tmp_path, identity=replace(IDENTITY, model="other"))) == (0, 0)


def test_state_that_memory_has_is_not_read_from_the_disk_for_a_while(tmp_path: Path) -> None:
    now_s = [0.0]
    tier = PrefixFiles(tmp_path, DiskFiles(), IDENTITY, clock=lambda: now_s[0])
    tier.put([new(128, 1, kept=True)])
    assert found(tier) == (0, 0)
    now_s[0] = 1.5 * LENT_S  # it may have left memory without a word
    assert found(tier) == (128, 1)
    assert found(tier) == (0, 0)


def test_what_is_not_here_or_in_memory_is_known_without_reading(tmp_path: Path) -> None:
    entry, tier = new(128, 1), files(tmp_path)
    key = entry.prefix.key

    def may() -> tuple[bool, bool]:
        return tier.may_find("a", TEXT), tier.may_name("a", key)

    assert may() == (False, False)
    tier.put([entry])
    assert may() == (True, True)
    assert not tier.may_find("b", TEXT)
    assert not tier.may_find("a", TEXT[:128])  # one is left to feed
    assert found(tier) == (128, 1)  # and so memory has it
    assert may() == (False, False)


def test_use_is_remembered_by_the_next_process(tmp_path: Path) -> None:
    tier = files(tmp_path, num=2)
    tier.put([new(128, 1), new(256, 2)])
    (oldest,) = tmp_path.glob("*/*-128.*")
    os.utime(oldest, (0, 0))
    files(tmp_path, num=2).put([new(128, 1)])  # it is here, and was of use
    files(tmp_path, num=2).put([new(290, 3)])
    assert found(files(tmp_path, num=2), text=TEXT[:200]) == (128, 1)
    assert {file.name[64:68] for file in tmp_path.glob("*/*")} == {"-128", "-290"}


def test_state_larger_than_all_room_is_not_written(tmp_path: Path) -> None:
    tier = PrefixFiles(tmp_path, DiskFiles(), IDENTITY, FILE_BYTES - 1)
    tier.put([new(128, 1)])
    assert len(tier) == len(list(tmp_path.glob("*/*"))) == 0


def test_files_that_are_too_many_for_a_new_bound_are_removed_at_start(tmp_path: Path) -> None:
    files(tmp_path).put([new(128, 1), new(256, 2), new(290, 3)])
    assert len(files(tmp_path, num=1)) == 1
    assert found(files(tmp_path)) == (290, 3)


def test_what_was_unused_for_too_long_is_removed(tmp_path: Path) -> None:
    files(tmp_path).put([new(128, 1), new(256, 2)])
    (old,) = tmp_path.glob("*/*-128.*")
    os.utime(old, (0, 0))
    assert len(files(tmp_path)) == 2
    tier = PrefixFiles(tmp_path, DiskFiles(), IDENTITY, max_age_s=86_400)
    assert len(tier) == 1
    (left,) = tmp_path.glob("*/*")
    os.utime(left, (0, 0))
    tier.put([new(290, 3)])
    assert [file.name[64:68] for file in tmp_path.glob("*/*")] == ["-290"]


def test_leftover_of_a_crash_is_removed_and_foreign_files_are_not(tmp_path: Path) -> None:
    tier = files(tmp_path)
    tier.put([new(128, 1)])
    (file,) = tmp_path.glob("*/*")
    leftover, foreign = file.with_suffix(".new"), file.with_name("notes.safetensors")
    for path in (leftover, foreign):
        path.write_bytes(b"x" * FILE_BYTES)
    assert len(files(tmp_path)) == 1
    assert not leftover.exists()
    assert foreign.exists()


def test_default_bound_leaves_a_disk_nine_tenths_of_what_it_has_free(tmp_path: Path) -> None:
    assert default_bytes(100 << 30) == DEFAULT_PREFIX_BYTES
    assert default_bytes(50 * MIB) == 5 * MIB
    assert default_bytes(0) == 0
    tier = PrefixFiles(tmp_path, DiskFiles(), IDENTITY)
    tier.put([new(128, 1)])
    assert found(tier) == (128, 1)


def test_file_stays_where_the_process_has_too_many_open(tmp_path: Path) -> None:
    tier = PrefixFiles(tmp_path, TooManyOpen(), IDENTITY)
    tier.put([new(128, 1)])
    assert found(tier) == (0, 0)
    assert found(files(tmp_path)) == (128, 1)


class TooManyOpen(DiskFiles):
    """Cannot open what is to be read."""

    def read(self, path: Path) -> bytes:
        raise OSError(errno.EMFILE, "too many open files", str(path))
