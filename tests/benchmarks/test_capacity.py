"""The capacity benchmark: bytes for each session follow from those of the process."""

from __future__ import annotations

import numpy as np

from benchmarks.capacity import fork_times, kv_caches, per_session


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
