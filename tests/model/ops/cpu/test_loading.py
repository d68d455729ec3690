"""Weights are packed from their file some rows at a time: no copy of them is ever held."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from model.native.runtime import Runtime
from model.weights import num_parameters
from tests.model.ops.cpu.models import SERVED, small_model
from tests.rwkv7 import Shape, published, write_pth

pytestmark = pytest.mark.process

#: Of what serving needs.
MAX_PEAK = 1.3

LOAD = """
import json, sys
from pathlib import Path
import numpy.random  # what a first array imports
from model.families.rwkv7.read import read_native
from model.native.runtime import Runtime
from model.weights.torch_file import TorchFile


def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


before = memory("VmHWM:")
config, weights = read_native(TorchFile(Path(sys.argv[1])), "model.pth")
runtime = Runtime(config, weights, sys.argv[2])
pool = runtime.empty_pool(1)
runtime.run(pool, [0], [0], [[1]], [runtime.draw(temperature=0.0)])
print(json.dumps([memory("VmHWM:") - before, memory("VmRSS:") - before, runtime._native.num_bytes]))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary and a width of real sizes in one layer: 139M weights, 278 MB."""
    small = published(Shape(65536, 64, 1, 64, 256, (4, 4, 4, 4)))
    width = 1024

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        sizes = [{64: width, 256: 4 * width}.get(size, size) for size in tensor.shape]
        return torch.full(sizes, 0.01, dtype=torch.bfloat16)

    weights = {key: wide(tensor) for key, tensor in small.items()}
    weights["blocks.0.att.r_k"] = torch.full((width // 64, 64), 0.01, dtype=torch.bfloat16)
    return write_pth(tmp_path_factory.mktemp("large") / "model.pth", weights)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_peak_of_loading_is_near_what_serving_needs(file: Path, dtype: str) -> None:
    command = [sys.executable, "-c", LOAD, str(file), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, steady, packed = json.loads(output)
    assert peak <= MAX_PEAK * steady
    assert steady <= MAX_PEAK * packed


@pytest.mark.parametrize("name", [SERVED[0], "rwkv7"])
def test_progress_ends_with_all_weights(name: str) -> None:
    config, weights = small_model(name)
    found: list[int] = []
    Runtime(config, weights, "int8", progress=found.append)
    assert all(a < b for a, b in pairwise(found))
    assert found[-1] >= num_parameters(config)
