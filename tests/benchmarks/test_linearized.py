"""Mechanisms in the place of a Llama's attention: what they read, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.studies import linearized
from benchmarks.studies.linearized import SWAPS, Swapped, rows
from model.convert.linearize.plan import window_plan
from tests.model.convert.linearize.test_files import write_llama
from tests.model.convert.linearize.tiny import SHAPE, tiny_ids, tiny_llama

pytestmark = pytest.mark.slow

KINDS = "elu", "retnet", "vq", "soft_vq", "gated", "delta"


@pytest.mark.parametrize("place", ["whole", "far"])
@pytest.mark.parametrize("name", KINDS)
def test_output_depends_on_the_past_alone(name: str, place: str) -> None:
    model = Swapped(tiny_llama(), window_plan(SHAPE.num_layers, 64), SWAPS[name], place).eval()
    linearized.calibrate(model, tiny_ids(90, rows=1))
    ids = tiny_ids(90, rows=1)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % SHAPE.vocab_size
    with torch.no_grad():
        one, other = model.hidden(ids), model.hidden(changed)
    assert torch.allclose(one[0, :-1], other[0, :-1], atol=1e-5)
    assert one.isfinite().all()


def test_far_part_sees_what_left_the_window_alone() -> None:
    """Without a share of it the output is that of the window; with one, older tokens count."""
    model = Swapped(tiny_llama(), window_plan(SHAPE.num_layers, 64), SWAPS["elu"], "far").eval()
    alone = Swapped(tiny_llama(), window_plan(SHAPE.num_layers, 64), None, "control").eval()
    ids = tiny_ids(90, rows=1)
    with torch.no_grad():
        found, window = model.hidden(ids), alone.hidden(ids)
    assert torch.allclose(found[0, :68], window[0, :68], atol=1e-5)
    assert not torch.allclose(found[0, 68:], window[0, 68:], atol=1e-3)


def test_rows_are_run_once_and_continue(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "tiny.gguf", tiny_llama())
    text = tmp_path / "text.txt"
    text.write_text("The old clock told a story of the thing.\n\n" * 120, encoding="utf-8")
    out = tmp_path / "rows.json"
    words = [str(source), "--data", str(text), "--valid", str(text), "--output", str(out)]
    words += ["--length", "96", "--match-steps", "2", "--tune-steps", "2", "--pieces", "1"]
    words += ["--valid-length", "120", "--rows", "source control"]
    linearized.main(words)
    linearized.main([*words, "elu far", "window 64 control"])
    found = json.loads(out.read_text(encoding="utf-8"))
    state = {name: row.get("state_bytes", 0) for name, row in found["rows"].items()}
    assert list(found["rows"]) == ["source control", "window 64 control", "elu far"]
    bits = found["rows"]["elu far"]["bits_per_byte"]
    assert list(bits) == ["at once", "matched", "fine-tuned"]
    assert len(found["rows"]["elu far"]["errors"]) == 2
    assert state["elu far"] > state["window 64 control"] > 0
    with pytest.raises(SystemExit, match="another recipe"):
        linearized.main([*words[:-1], "gated far", "--length", "80"])


def test_each_mechanism_stands_in_both_places() -> None:
    assert {place for _, place in rows()} == {"control", "far", "whole"}
    assert len(rows()) == 4 + 2 * len(SWAPS)
