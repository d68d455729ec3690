"""The prefix cache's files, on a real folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from server.store.base import DiskFiles, Identity
from server.store.portable import encode_prefix
from server.store.sqlite.files import PrefixFiles
from tests.server.store.prefixes import IDENTITY, TEXT, found, named, new

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
