from __future__ import annotations

import contextlib
import io

import pytest

from model.convert.linearize.train import LINE_EVERY_S, metered


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def resumed(seconds: float) -> None:
    """Of 1,000 tokens 900 are done before, and 50 in so many ``seconds``."""
    clock = Clock()
    with metered("distil", 1000, 900, clock=clock) as meter:
        clock.now_s += seconds
        meter.update(950, "1.2 bits/byte")


@pytest.mark.parametrize(("seconds", "left"), [(10, "0:00:10"), (7200, "2:00:00")])
def test_bar_of_a_resumed_stage_has_the_time_left_at_the_rate_of_this_run(
    seconds: float, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step takes longer than the 30 seconds of which rich keeps the speed."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.redirect_stdout(terminal):
        resumed(seconds)
    assert f"{left} left" in terminal.getvalue()
    assert f"{50 / seconds:,.0f} tokens/s" in terminal.getvalue()


def test_line_of_a_resumed_stage_has_the_same_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    resumed(2 * LINE_EVERY_S)
    assert "distil 950/1,000 tokens  1.2 bits/byte  1 tokens/s  0:01:00 left" in (
        capsys.readouterr().out
    )
