"""The same bits on Arm: a cross-compiled program replays every mechanism under emulation.

Needs Debian's ``g++-aarch64-linux-gnu`` and ``qemu-user``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import model.ops.cpu.runtime
from model.ops.cpu.runtime import DTYPES
from tests.model.ops.cpu.arm.recording import record
from tests.model.ops.cpu.models import FUSED, NAMES, random_tokens, small_runtime, small_weights

pytestmark = pytest.mark.slow

SOURCES = Path(model.ops.cpu.runtime.__file__).parent / "src"
PROGRAM = Path(__file__).parent / "replay.cpp"
#: Those of CMakeLists.txt, and nothing may be warned of.
COMPILE = [
    "aarch64-linux-gnu-g++",
    *("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Werror", "-march=armv8-a", "-static", "-pthread"),
    "-DEVERSTREAM_LEVEL=neon",
]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, for Arm."""
    program = tmp_path_factory.mktemp("arm") / "replay"
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "bindings.cpp"]
    command = [*COMPILE, f"-I{SOURCES}", PROGRAM, *sources, "-o", program]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_arm_gives_the_same_bits(replay: Path, name: str, dtype: str, tmp_path: Path) -> None:
    config, weights = small_weights(name)
    tokens = random_tokens(config, 70)
    record(tmp_path / "model", config, weights, tokens)
    runtime = small_runtime(name, dtype, 1, FUSED)
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    command = ["qemu-aarch64", replay, tmp_path / "model", dtype, "neon"]
    found = subprocess.run(command, check=True, capture_output=True).stdout
    assert found == runtime.logits()[0].tobytes() + pool[0].tobytes()
