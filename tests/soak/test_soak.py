"""The soak in its short form, against a real server process with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.__main__ import Options, soak
from tests.tiny import write_model


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_server_is_idle_after_every_kind_of_visit(tmp_path: Path) -> None:
    write_model(tmp_path)
    options = Options(
        seconds=12,
        warm_up_s=6,
        streams=16,
        max_sessions=16,
        session_ttl_s=4,
        threads=1,
        model=str(tmp_path),
    )
    report = soak(options)
    assert not report.failures, "\n".join(report.failures)
    assert report.tally.refused["capacity_exhausted"] > 0
    for visit in ("stream", "same_tokens", "kept_session", "cancel", "cut_socket", "bad_body"):
        assert report.tally.done[visit] > 0, report.tally.done
    assert report.tally.done["fill_and_empty"] == 1
