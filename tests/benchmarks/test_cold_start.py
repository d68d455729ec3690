"""The cold start's measurement starts a real server and hears a token."""

from __future__ import annotations

from benchmarks.cold_start import start_once


def test_token_comes_after_the_server_is_ready() -> None:
    ready_s, first_token_s = start_once(["--threads", "1"])
    assert 0 < ready_s < first_token_s
