"""The plain linear kernel: it trains next to `elu`, with denominators of both signs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import linear_kernel
from model.attention import MECHANISMS
from tests.tiny import TEXT


def test_half_of_the_denominators_are_negative_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 200, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["linear_kernel", "--data", str(text), "--steps", "2"])
    monkeypatch.setitem(MECHANISMS, linear_kernel.NAME, MECHANISMS["elu"])  # taken back afterwards
    threads = torch.get_num_threads()
    try:
        linear_kernel.main()
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0.2 < result[linear_kernel.NAME]["negative_denominators"] < 0.8
    assert result["elu"]["stopped"] == ""
