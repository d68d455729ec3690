"""The code of the levels v4dot and amx, with their own instructions emulated by those of v4.

A processor that has them runs these levels in all other tests, which go over `levels()`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from model.native.runtime import Runtime, levels
from tests.gguf_blocks import KINDS
from tests.model.ops.cpu.models import (
    ROUNDING_LEVELS,
    SERVED,
    random_tokens,
    small_model,
    small_runtime,
)
from tests.model.ops.cpu.replay.build import HERE, build_replay
from tests.model.ops.cpu.replay.recording import record
from tests.model.ops.cpu.test_gguf_blocks import mixed, runtime_of
from tests.model.representatives import chosen

Weights = Mapping[str, npt.NDArray[np.float32]]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(1200),  # a compilation takes minutes where others want the cores
    pytest.mark.skipif("v4" not in levels(), reason="needs v4 to emulate with"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The programs whose level v4 is the code of v4dot, or of amx. Each is compiled once."""

    @cache
    def program(level: str) -> Path:
        header = {"v4dot": "emulated_dot.h", "amx": "emulated_amx.h"}[level]
        flags = ["-O1", "-march=x86-64-v4", "-DEVERSTREAM_LEVEL=v4", "-include", str(HERE / header)]
        compiler = os.environ.get("CXX", "g++")
        return build_replay(level, compiler, flags, tmp_path_factory)

    return program


@pytest.fixture(params=ROUNDING_LEVELS)
def replay(programs: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    return programs(request.param)


def bits(
    replay: Path, runtime: Runtime, weights: Weights, length: int, folder: Path
) -> tuple[bytes, bytes]:
    """Logits and state after a text: by the program, and by a runtime of this processor's v4."""
    tokens = random_tokens(runtime.config, length)
    record(folder / "model", runtime.config, weights, [tokens])
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    command = [replay, folder / "model", runtime.dtype, "v4"]
    found = subprocess.run(command, check=True, capture_output=True).stdout
    return found, runtime.logits()[0].tobytes() + pool[0].tobytes()


@pytest.mark.parametrize(("name", "dtype"), chosen(SERVED, ["int8", "float32", "int4"]))
def test_exact_products_keep_their_bits(
    replay: Path, name: str, dtype: str, tmp_path: Path
) -> None:
    runtime = small_runtime(name, dtype, 1, "v4")
    found, wanted = bits(replay, runtime, small_model(name)[1], 70, tmp_path)
    assert found == wanted


@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_keep_their_bits(replay: Path, kind: str, length: int, tmp_path: Path) -> None:
    """One row takes other tiles than many."""
    runtime = runtime_of("gated", kind, 1, "v4")
    found, wanted = bits(replay, runtime, mixed("gated", kind)[1], length, tmp_path)
    assert found == wanted


@pytest.mark.parametrize("name", SERVED)
def test_bfloat16_inputs_are_rounded(replay: Path, name: str, tmp_path: Path) -> None:
    config, weights = small_model(name)
    runtime = small_runtime(name, "bfloat16", 1, "v4")
    found, wanted = (
        logits(part, config.vocab_size) for part in bits(replay, runtime, weights, 70, tmp_path)
    )
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert 0 < error < 0.02  # a rounding is 2^-9, and there are some twenty of them


@pytest.mark.parametrize("length", [1, 20, 70])
@pytest.mark.skipif("amx" not in levels(), reason="nothing to compare with")
def test_emulated_amx_has_the_bits_of_the_unit(
    programs: Callable[[str], Path], length: int, tmp_path: Path
) -> None:
    runtime = small_runtime("gated", "bfloat16", 1, "amx")
    found, wanted = bits(programs("amx"), runtime, small_model("gated")[1], length, tmp_path)
    assert found == wanted


def logits(part: bytes, vocab_size: int) -> npt.NDArray[np.float32]:
    return np.frombuffer(part, np.float32, vocab_size)
