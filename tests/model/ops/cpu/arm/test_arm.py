"""The same bits on Arm: a cross-compiled program replays every mechanism under emulation.

Needs Debian's ``g++-aarch64-linux-gnu`` and ``qemu-user``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from model.native.runtime import DTYPES
from tests.model.ops.cpu.models import FUSED, SERVED, random_tokens, small_model, small_runtime
from tests.model.ops.cpu.replay.build import build_replay
from tests.model.ops.cpu.replay.recording import record
from tests.model.representatives import chosen

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, for Arm. Nothing may be warned of."""
    flags = ["-Wall", "-Wextra", "-Werror", "-march=armv8-a", "-static", "-DEVERSTREAM_LEVEL=neon"]
    program = tmp_path_factory.mktemp("arm") / "replay"
    return build_replay(program, "aarch64-linux-gnu-g++", flags)


@pytest.mark.parametrize(("name", "dtype"), chosen(SERVED, DTYPES))
def test_arm_gives_the_same_bits(replay: Path, name: str, dtype: str, tmp_path: Path) -> None:
    config, weights = small_model(name)
    tokens = random_tokens(config, 70)
    record(tmp_path / "model", config, weights, tokens)
    runtime = small_runtime(name, dtype, 1, FUSED)
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    command = ["qemu-aarch64", replay, tmp_path / "model", dtype, "neon"]
    found = subprocess.run(command, check=True, capture_output=True).stdout
    assert found == runtime.logits()[0].tobytes() + pool[0].tobytes()
