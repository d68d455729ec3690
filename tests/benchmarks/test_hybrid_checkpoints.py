"""The benchmark of hybrids' files: its shapes, its costs, its command line."""

from __future__ import annotations

import math

import pytest

from benchmarks.checkpoints.__main__ import arguments
from benchmarks.checkpoints.hybrids import CONFIGS, position_numbers, step_cost
from benchmarks.decode.peers import Point
from model.state import StateLayout
from model.weights import num_parameters


@pytest.mark.parametrize(
    ("size", "parameters", "position_bytes"),
    [
        ("qwen35-0.8B", 752_393_024, 12_288),
        ("lfm2-350M", 354_483_968, 12_288),
        ("granite-4.0-h-350M", 340_332_224, 4_096),
    ],
)
def test_shapes_have_the_published_parameters_and_past(
    size: str, parameters: int, position_bytes: int
) -> None:
    assert num_parameters(CONFIGS[size]) == parameters
    assert 2 * position_numbers(CONFIGS[size]) == position_bytes
    assert 16 * position_bytes == StateLayout.of(CONFIGS[size]).group_bytes


def test_cost_of_a_step_is_weights_states_past_and_logits() -> None:
    def cost(streams: int, context: int) -> int:
        return step_cost(Point("qwen35-0.8B", "bfloat16", streams, context, 1), 12_288).num_bytes

    config = CONFIGS["qwen35-0.8B"]
    fixed_bytes = StateLayout.of(config).fixed_bytes
    matrices = sum(math.prod(s) for s in config.weight_shapes().values() if len(s) == 2)
    assert cost(1, 0) > 2 * matrices + 2 * fixed_bytes
    assert cost(1, 4096) - cost(1, 0) == 4096 * 12_288
    per_stream = 2 * fixed_bytes + 12_288 + 2 * 1024 + 4 * config.vocab_size
    assert cost(2, 0) - cost(1, 0) == per_stream


def test_family_decides_sizes_peers_and_the_result() -> None:
    options = arguments(["--family", "lfm2", "--context", "0", "4096"])
    assert (options.size, options.peer) == (["lfm2-350M"], ["llama.cpp"])
    assert options.output.name == "checkpoints_lfm2.json"
    assert arguments(["--family", "mamba2"]).size == ["mamba2 130M", "mamba2 780M"]
    assert arguments([]).peer == ["llama.cpp", "rwkv"]
    with pytest.raises(SystemExit):
        arguments(["--family", "lfm2", "--peer", "rwkv"])
