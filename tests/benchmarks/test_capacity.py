"""The capacity benchmark: bytes for each session follow from those of the process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import capacity
from benchmarks.capacity import fork_times, kv_caches, per_session
from benchmarks.decode.models import config_of
from benchmarks.decode.shapes import SIZES
from model.state import StateLayout


def test_bytes_per_session_are_the_growth_by_session() -> None:
    assert per_session(before=1000, after=4000, num_sessions=30) == 100


def test_fork_is_a_copy_of_a_row() -> None:
    pool = np.arange(3, dtype=np.uint8).repeat(64).reshape(3, 64)
    assert len(fork_times(pool, num_forks=20)) == 20
    assert (pool == pool[:, :1]).all()  # whole rows
    assert len(set(pool[:, 0].tolist())) < 3  # of which some were copied


def test_cache_grows_with_the_text_and_so_does_its_copy() -> None:
    short, long = kv_caches(100, [10, 1000], bytes_per_s=1e6)
    assert short == {"tokens": 10, "bytes": 1000, "copy_us": 1000.0}
    assert long["copy_us"] == 100 * short["copy_us"]


def test_program_ends_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capacity.main(
        f"--size tiny --sessions 700 --active 9 --forks 20 --fork-slots 8 --lengths 10"
        f" --models {tmp_path}".split()
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    sessions, resident = last["sessions"], last["sessions"]["resident_bytes"]
    state_bytes = StateLayout.of(config_of(SIZES["tiny"], "gated")).num_bytes
    assert sessions["state_bytes"] == state_bytes
    idle = per_session(resident["first"], resident["idle"], 699)
    assert sessions["idle_bytes_per_session"] == idle
    assert state_bytes * 0.9 < idle < state_bytes + 20_000
    active = per_session(resident["idle"], resident["active"], 9)
    assert sessions["extra_bytes_per_active_session"] == active
    assert last["fork"]["median_us"] > 0
    (cache,) = last["kv_cache"]
    assert cache["bytes"] == 10 * 2 * 2 * 64 * 2  # tokens, K and V, layers, width, bytes


def test_more_sessions_than_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"sessions need .* of memory"):
        capacity.main(f"--size tiny --sessions 50000000 --models {tmp_path}".split())
