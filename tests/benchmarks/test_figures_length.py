"""The length benchmark: its memory is the layer's own, its curves end, its crossings are right."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import length
from benchmarks.length import (
    Limits,
    Point,
    crossing,
    crossings,
    make_layer,
    measure_apart,
    measure_curve,
    measure_here,
    one_pass,
)
from model.attention import MECHANISMS
from model.attention.base import Losses
from model.attention.elu import EluAttention
from model.config import ModelConfig

MIB = 1 << 20


class Greedy(EluAttention):
    """Takes a number of MiB that grows with the text, far beyond what the small layer needs."""

    def parallel(self, x: Tensor, losses: Losses = None) -> Tensor:
        taken = torch.ones(x.shape[1] // 4 * MIB, dtype=torch.uint8)
        return x * taken[0]


def greedy() -> Greedy:
    config = ModelConfig(vocab_size=1, hidden_size=8, num_attention_heads=1, head_dim=8)
    return Greedy(config)


def points(*seconds: float, peak: int = 1) -> list[Point]:
    return [Point(256 << i, s, peak) for i, s in enumerate(seconds)]


def test_memory_is_what_one_pass_takes() -> None:
    for num_tokens, wanted in ((256, 64), (1024, 256)):
        point = measure_apart(greedy, "prefill", num_tokens, Limits())
        assert point is not None
        assert point.tokens == num_tokens
        warm_up = 16  # MiB that the pass before it took already
        assert wanted - warm_up - 2 < point.peak_bytes / MIB < wanted + 8


def test_parent_is_left_as_it_was() -> None:
    before = length.peak_bytes()
    measure_apart(greedy, "prefill", 2048, Limits())
    assert length.peak_bytes() - before < 64 * MIB


def test_point_beyond_the_limit_on_memory_ends_the_curve() -> None:
    limits = Limits(bytes=128 * MIB)
    assert measure_apart(greedy, "prefill", 4096, limits) is None
    curve = measure_curve(greedy, "prefill", [256, 768, 1000, 1024], limits)
    assert [point.tokens for point in curve] == [256, 768]


def test_slow_point_ends_the_curve() -> None:
    assert len(measure_curve(greedy, "prefill", [256, 512], Limits(seconds=0.0))) == 1


def test_error_in_the_child_is_an_error_here() -> None:
    unknown = functools.partial(make_layer, "no such mechanism", 16, 2)
    with pytest.raises(RuntimeError, match=r"training at 64 tokens died: .*no such mechanism"):
        measure_apart(unknown, "training", 64, Limits())


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("mode", length.MODES)
def test_every_mechanism_can_be_measured(name: str, mode: str) -> None:
    layer = make_layer(name, 16, 2)
    assert layer.config.head_dim == 8
    one_pass(layer, mode, torch.randn(1, 130, 16))
    gradients = [p.grad is not None for p in layer.parameters()]
    assert any(gradients) == (mode == "training")


def test_time_is_positive_and_of_the_length_asked_for() -> None:
    point = measure_here(make_layer("elu", 16, 2), "training", 96, Limits())
    assert point.tokens == 96
    assert 0 < point.seconds < 10


def test_crossing_lies_on_the_logarithmic_line_between_two_lengths() -> None:
    baseline = points(1.0, 4.0, 16.0)
    curve = points(2.0, 4.0 / 2.0**0.5, 8.0)  # 2, then 2^-1/2 of the baseline
    found = crossing(curve, baseline, lambda p: p.seconds)
    assert found == pytest.approx(256 * 2 ** (1 / 1.5))


def test_crossing_is_the_last_one() -> None:
    baseline = points(1.0, 1.0, 1.0, 1.0)
    found = crossing(points(0.5, 2.0, 2.0, 0.5), baseline, lambda p: p.seconds)
    assert found == pytest.approx(1024 * 2**0.5)


def test_curve_below_from_the_start_and_one_never_below() -> None:
    baseline = points(1.0, 1.0)
    assert crossing(points(0.5, 0.9), baseline, lambda p: p.seconds) == 0
    assert crossing(points(0.5, 1.1), baseline, lambda p: p.seconds) is None


def test_curve_that_ends_early_is_compared_as_far_as_it_goes() -> None:
    found = crossings({"prefill": {"slow": points(2.0), "softmax": points(1.0, 9.0)}})
    assert found == {"prefill": {"slow": {"time": None, "memory": None}}}


def test_program_ends_with_json_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png, file = tmp_path / "a.png", tmp_path / "a.json"
    length.main(
        f"--mechanisms elu softmax --lengths 64 128 --hidden-size 32 --heads 2"
        f" --plot {png} --output {file}".split()
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads(file.read_text(encoding="utf-8"))
    assert [p["tokens"] for p in last["curves"]["training"]["elu"]] == [64, 128]
    assert last["below_softmax_from"]["prefill"].keys() == {"elu"}
    assert png.read_bytes().startswith(b"\x89PNG")
