"""The server that is measured: what it does unless a flag says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.process import ServerProcess
from tests.tiny import write_model


@pytest.mark.parametrize("flags", [(), ("--speculation", "auto")])
def test_drafts_are_off_unless_a_flag_turns_them_on(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERSTREAM_SPECULATION")
    model = write_model(tmp_path / "model")
    flags = ("--model", str(model), "--threads", "1", "--log-level", "debug", *flags)
    with ServerProcess(*flags) as server:
        assert ("tokens are drafted" in server.log()) == ("auto" in flags)
