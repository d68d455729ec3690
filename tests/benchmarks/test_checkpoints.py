"""The benchmark of published RWKV-7 files: its shapes, its costs, what it reports."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.checkpoints import folders, hybrids, shapes
from benchmarks.checkpoints.__main__ import arguments, kept, points
from benchmarks.checkpoints.shapes import CONFIGS, random_weights
from benchmarks.decode.models import step_cost
from benchmarks.decode.peers import Measured, Opened, Point
from benchmarks.decode.report import Row, Turns, figures_of
from benchmarks.decode.roofline import ITEM_BYTES, Cost, runtime_dtype
from benchmarks.machine import machine
from benchmarks.report import Figures, write_result
from benchmarks.studies.pages.models import full_table, summary_table, table
from model.families.rwkv7.config import Rwkv7Config
from model.state import StateLayout
from model.weights import num_parameters

SMALL = Rwkv7Config(97, 32, 2, 16, 64, 8, 8, 4, 12)


@pytest.mark.parametrize(
    ("size", "millions", "megabytes"),
    [("0.1B", 191.0, 2.43), ("0.4B", 450.8, 6.49), ("1.5B", 1527.4, 12.98)],
)
def test_shapes_have_the_published_parameters_and_state(
    size: str, millions: float, megabytes: float
) -> None:
    config = CONFIGS[size]
    assert num_parameters(config) / 1e6 == pytest.approx(millions, rel=2e-3)
    assert StateLayout.of(config).num_bytes / 1e6 == pytest.approx(megabytes, rel=2e-3)


def test_random_weights_are_all_of_the_model_and_the_same_every_time() -> None:
    weights, again = random_weights(SMALL), random_weights(SMALL)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == dict(
        SMALL.weight_shapes()
    )
    assert all(weights[name].equal(again[name]) for name in weights)


def test_cost_of_a_step_is_weights_state_and_logits() -> None:
    one, two = step_cost(SMALL, 2, 1, 1), step_cost(SMALL, 2, 2, 2)
    matrices = [shape for shape in SMALL.weight_shapes().values() if len(shape) == 2]
    products = sum(math.prod(shape) for shape in matrices) - 97 * 32
    assert one.num_bytes > 2 * products + 2 * StateLayout.of(SMALL).num_bytes
    assert two.operations == 2 * one.operations
    per_stream = 2 * StateLayout.of(SMALL).num_bytes + 4 * 97 + 2 * 32
    assert two.num_bytes - one.num_bytes == per_stream


def test_cost_of_a_step_counts_a_head_that_is_the_embedding() -> None:
    config = folders.config_of("mamba2 130M")
    one, two = step_cost(config, 2, 1, 1), step_cost(config, 2, 2, 2)
    state = StateLayout.of(config).num_bytes
    assert one.num_bytes > 2 * num_parameters(config) + 2 * state
    assert two.num_bytes - one.num_bytes == 2 * state + 4 * 50_288 + 2 * 768


def test_report_divides_by_each_peer_and_names_who_did_not_take_part() -> None:
    opened = Opened("bf16", 100, 1, Cost(1000, 10))
    ours = Turns(opened, 1e9, [Measured(30, 1.0), Measured(10, 1.0), Measured(20, 1.0)], [4e4])
    theirs = Turns(opened, 1e9, [Measured(10, 1.0)], [1e4])
    point = Point("0.1B", "bfloat16", 1, 0, 1)
    turns = {"everstream": ours, "llama.cpp": theirs}
    row = figures_of(Row(point, turns, {"rwkv": "none"}), ("everstream",))
    assert row["ratios"] == {"llama.cpp": 2.0}
    assert row["contenders"]["everstream"]["fraction"] == 0.5
    assert row["skipped"] == {"rwkv": "none"}
    assert "| bfloat16 | 1 | 1 stream | 20.0 | 50% (bandwidth) | 10.0 | 2.00 |" in table([row])
    assert full_table([row]).endswith("| 0.1B | bfloat16 | 20.0 (2.00x, 50%) |")


@pytest.mark.parametrize(("kind", "name"), [("q4_0", "Q4_0"), ("q4_k_m", "Q4_K_M")])
def test_files_that_llama_cpp_rounds_lie_next_to_their_origin(
    tmp_path: Path, kind: str, name: str
) -> None:
    files = (
        shapes.file_of(made(tmp_path / f"0.4B-llama-{name}.gguf"), "0.4B", kind),
        hybrids.file_of(made(tmp_path / f"qwen35-0.8B-llama-{name}.gguf"), "qwen35-0.8B", kind),
        folders.gguf_of(made(tmp_path / f"mamba2-130M-llama-{name}.gguf"), "mamba2 130M", kind),
    )
    assert {file.name for file in files} == {path.name for path in tmp_path.glob("*llama*")}
    assert (runtime_dtype(kind), ITEM_BYTES[kind]) == ("int4", ITEM_BYTES["int4"])


def made(file: Path) -> Path:
    """The folder of ``file`` and of the BF16 one that it would be made from."""
    for ending in (file.name, f"{file.name.partition('-llama')[0]}-BF16.gguf"):
        file.with_name(ending).touch()
    return file.parent


def test_summary_compares_four_bits_with_llama_cpp_and_with_int8() -> None:
    def row(dtype: str, rate: float, ratio: float) -> list[Figures]:
        works = [("decode", 1), ("decode", 8), ("decode", 64), ("prefill", 1)]
        found = {
            "contenders": {"everstream": {"tokens_per_s": rate}},
            "ratios": {"llama.cpp": ratio},
        }
        return [
            asdict(Point("0.4B", dtype, streams, 0, 2, mode)) | found for mode, streams in works
        ]

    lines = summary_table(row("int8", 100, 1.5) + row("q4_k_m", 160, 1.25)).splitlines()
    assert lines[-2].startswith("| 0.4B | int8 | 100 (1.50x) |")
    assert lines[-1].startswith("| 0.4B | Q4_K_M | 160 (1.25x, 1.60x int8) |")


def test_rows_that_are_not_measured_again_are_kept(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    words = ["--size", "0.1B", "--streams", "1", "--dtype", "int8", "--output", str(output)]
    all_of_it = arguments([*words, "--threads", "1", "2"])
    rows = [asdict(point) for threads in (1, 2) for point in points(all_of_it, threads)]
    origin = {"command": "the first", "machine": machine(), "rounds": 3, "seconds": 1.0}
    write_result(output, {**origin, "rows": rows})
    found = kept(arguments([*words, "--threads", "2", "--keep"]))
    assert found["earlier_commands"] == ["the first"]
    assert found["rows"] == [row for row in rows if row["threads"] == 1]
    assert kept(arguments([*words, "--threads", "2"])) == {"rows": []}
    with pytest.raises(SystemExit, match="has other rounds, seconds or another machine"):
        kept(arguments([*words, "--threads", "2", "--rounds", "2", "--keep"]))
