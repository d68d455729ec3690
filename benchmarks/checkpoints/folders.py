"""Folders and GGUF files of random weights in the `published` shapes.

The tokenizer is that of the bundled model.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.checkpoints import four_bits
from benchmarks.checkpoints.published import PUBLISHED
from benchmarks.process import ROOT, make_once
from model.architectures.config import Config
from model.bundled_models import DEFAULT_MODEL

#: Layers of models that are measured in part.
CUT_LAYERS = {"mamba Falcon 7B": 8}
#: Of `everstream export`, and how the file's name ends, by our types.
GGUF_DTYPES = {
    "float32": ("float32", "F32"),
    "bfloat16": ("bfloat16", "BF16"),
    "int8": ("q8_0", "Q8_0"),
    "int4": ("q4_0", "Q4_0"),
}


def config_of(name: str) -> Config:
    """Of a family and a size: "mamba2 130M"."""
    family, _, size = name.partition(" ")
    config = PUBLISHED[family][size]
    if name in CUT_LAYERS:
        layers = CUT_LAYERS[name]
        config = dataclasses.replace(config, num_hidden_layers=layers)  # type: ignore[type-var]
    return config


def folder_of(models: Path, name: str) -> Path:
    """A folder of ours with random bfloat16 weights, made where it is missing."""
    config = config_of(name)

    def write(path: Path) -> None:
        path.mkdir(parents=True)
        config.save(path / "config.json")
        save_file(random_weights(config), path / "model.safetensors")
        shutil.copy(Path(DEFAULT_MODEL) / "tokenizer.json", path)

    return make_once(models / name.replace(" ", "-"), write)


def gguf_of(models: Path, name: str, dtype: str) -> Path:
    """The same weights in GGUF, in one of `GGUF_DTYPES` or of `four_bits.KINDS`."""
    if dtype in four_bits.KINDS:
        return four_bits.quantized(gguf_of(models, name, "bfloat16"), dtype)
    kind, ending = GGUF_DTYPES[dtype]

    def write(path: Path) -> None:
        command = ["server.cli.main", "export", str(folder_of(models, name)), str(path)]
        options = ["--format", "gguf", "--dtype", kind]
        subprocess.run([sys.executable, "-m", *command, *options], cwd=ROOT, check=True)

    return make_once(models / f"{name.replace(' ', '-')}-{ending}.gguf", write)


def random_weights(config: Config) -> dict[str, Tensor]:
    """Weights by our names that keep the numbers finite."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in config.weight_shapes().items():
        weight = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            weight /= math.sqrt(shape[-1])
        elif name.endswith("norm.weight"):
            weight = 1 + 0.1 * weight
        weights[name] = weight.bfloat16()
    return weights
