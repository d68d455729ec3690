"""Runs the `rwkv` package on a file, in a process of its own: it reads its environment at import.

It prints in plain text and compiles TorchScript, which is why nothing of it is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.model.attention.packages import folder as package_folder

Array = npt.NDArray[np.float32]

CODE = """
import json, sys
import numpy, torch
torch.set_num_threads(1)
from rwkv.model import RWKV
path, out, prompt, count = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
model = RWKV(model=path, strategy="cpu fp32")
logits, state = model.forward(list(prompt), None, full_output=True)
arrays = {"logits": logits.numpy()}
for layer in range(len(state) // 3):
    for index, name in enumerate(("time_shift", "S", "channel_shift")):
        arrays[f"{layer}.{name}"] = state[3 * layer + index].clone().numpy()
last, tokens = logits[-1], []
for _ in range(count):
    tokens.append(int(last.argmax()))
    last, state = model.forward([tokens[-1]], state)
    last = last.flatten()
arrays |= {"tokens": numpy.array(tokens), "last": last.numpy(), "last_S": state[1].numpy()}
numpy.savez(out, **arrays)
"""


def run_package(file: Path, prompt: list[int], num_tokens: int) -> dict[str, Array]:
    """Logits and state after ``prompt``, then ``num_tokens`` greedy tokens and what follows."""
    package_folder("rwkv")
    out = file.with_suffix(".npz")
    settings = {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    arguments = [str(file.with_suffix("")), str(out), json.dumps(prompt), str(num_tokens)]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as arrays:
        return dict(arrays)
