"""A large model says how far its loading is; a small one says nothing."""

from __future__ import annotations

import io
import logging

import pytest

from server.models.loading import FEW, loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_at_each_quarter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "everstream.loading")
    num, stream = 4 * FEW, io.StringIO()
    with loading(num, stream) as progress:
        for num_read in range(0, num + 1, num // 50):
            progress(num_read)
        progress(num + 1000)  # a tied embedding is read twice
    assert caplog.messages == [f"loading the weights: {n}%" for n in (25, 50, 75, 100)]
    assert stream.getvalue() == ""


def test_bar_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with loading(2 * FEW, stream) as progress:
        progress(2 * FEW)
    assert "loading the weights" in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert caplog.messages == []


def test_small_model_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "everstream.loading")
    stream = Terminal()
    with loading(FEW, stream) as progress:
        progress(FEW)
    assert stream.getvalue() == ""
    assert caplog.messages == []
