"""The same bits on Arm: a cross-compiled program replays every mechanism under emulation.

Needs Debian's ``g++-aarch64-linux-gnu`` and ``qemu-user``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from model.architectures.config import Config
from model.native.runtime import DTYPES, Runtime
from tests.gguf_blocks import KINDS
from tests.int4 import Q4Weights
from tests.model.ops.cpu.models import (
    FUSED,
    ROUNDING_LEVELS,
    SERVED,
    random_tokens,
    small_model,
)
from tests.model.ops.cpu.replay.build import build_replay
from tests.model.ops.cpu.replay.recording import record
from tests.model.ops.cpu.test_gguf_blocks import mixed
from tests.model.representatives import chosen

#: A compilation takes minutes where others want the cores.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(FUSED in ROUNDING_LEVELS, reason="the one level built rounds as no other"),
]

Weights = Mapping[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, for Arm. Nothing may be warned of."""
    flags = [
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-march=armv8-a",
        "-static",
        "-DEVERSTREAM_LEVEL=neon",
    ]
    return build_replay("arm", "aarch64-linux-gnu-g++", flags, tmp_path_factory)


@pytest.mark.parametrize(("name", "dtype"), chosen(SERVED, DTYPES))
def test_arm_gives_the_same_bits(replay: Path, name: str, dtype: str, tmp_path: Path) -> None:
    config, weights = small_model(name)
    check(replay, config, weights, dtype, [random_tokens(config, 70)], tmp_path)


@pytest.mark.parametrize("lengths", [(1,), (20,)])
@pytest.mark.parametrize("kind", ["Q4_0", *KINDS])
def test_blocks_as_in_the_file_give_the_same_bits(
    replay: Path, kind: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """One row takes other tiles than many."""
    config, weights = blocks_of(kind)
    check(replay, config, weights, "int4", texts(config, lengths), tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mamba2", "int8"), ("gated", "bfloat16"), ("delta", "float32")]
)
def test_step_in_two_halves_gives_the_same_bits(
    replay: Path, name: str, dtype: str, tmp_path: Path
) -> None:
    """The states are read and written between the tiles of products."""
    config, weights = small_model(name)
    check(replay, config, weights, dtype, texts(config, HALVES), tmp_path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_step_in_two_halves_of_blocks_gives_the_same_bits(
    replay: Path, kind: str, tmp_path: Path
) -> None:
    config, weights = blocks_of(kind)
    check(replay, config, weights, "int4", texts(config, HALVES), tmp_path)


#: Of the sequences of a batch that is taken in two halves.
HALVES = (1, 2, 1) * 17


def blocks_of(kind: str) -> tuple[Config, Weights]:
    """A model with matrices of this type."""
    if kind != "Q4_0":
        return mixed("gated", kind)
    config, weights = small_model("gated")
    return config, Q4Weights(weights)


def texts(config: Config, lengths: Sequence[int]) -> list[list[int]]:
    return [random_tokens(config, length, seed) for seed, length in enumerate(lengths)]


def check(
    replay: Path,
    config: Config,
    weights: Weights,
    dtype: str,
    batch: list[list[int]],
    folder: Path,
) -> None:
    """That a batch of texts leaves the same logits and states on both processors."""
    record(folder / "model", config, weights, batch)
    runtime = Runtime(config, weights, dtype, 1, FUSED)
    slots = list(range(len(batch)))
    pool, draw = runtime.empty_pool(len(batch)), runtime.draw(temperature=0.0)
    runtime.run(pool, slots, [0] * len(batch), batch, [draw] * len(batch))
    command = ["qemu-aarch64", replay, folder / "model", dtype, "neon"]
    found = subprocess.run(command, check=True, capture_output=True).stdout
    assert found == runtime.logits().tobytes() + pool.tobytes()
