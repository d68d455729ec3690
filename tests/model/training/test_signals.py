from __future__ import annotations

import os
import signal

import pytest

from model.training.loop import signals_remembered


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_recorded_and_handlers_are_restored(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with signals_remembered() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert signal.getsignal(number) is before[number]
    assert {n: signal.getsignal(n) for n in before} == before
