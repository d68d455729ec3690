"""The published shapes of RWKV-7 World and G1, and files of random weights in them."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.checkpoints import four_bits
from benchmarks.process import ROOT, make_once
from model.families.rwkv7.config import Rwkv7Config
from model.tokenization.world import PUBLISHED

VOCABULARY = 65536
INTO_RESIDUAL = ("time_mix.output.weight", "channel_mix.value.weight")
#: What a file is called with whose weights; the formats of `everstream export`.
FORMATS = {
    "bfloat16": ("gguf", "bfloat16", "BF16.gguf"),
    "int8": ("gguf", "q8_0", "Q8_0.gguf"),
    "int4": ("gguf", "q4_0", "Q4_0.gguf"),
    "float32": ("gguf", "float32", "F32.gguf"),
    "pth": ("pth", "bfloat16", "bf16.pth"),
    "hf": ("hf", "bfloat16", "hf"),
}


def _config(width: int, layers: int, ranks: tuple[int, int, int, int]) -> Rwkv7Config:
    decay, rate, value, gate = ranks
    return Rwkv7Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=4 * width,
        decay_rank=decay,
        rate_rank=rate,
        value_rank=value,
        gate_rank=gate,
    )


#: Widths, layers and ranks (w, a, v, g) of the published models.
CONFIGS = {
    "0.1B": _config(768, 12, (64, 64, 32, 128)),
    "0.4B": _config(1024, 24, (64, 64, 32, 128)),
    "1.5B": _config(2048, 24, (96, 96, 64, 256)),
}


def file_of(folder: Path, size: str, kind: str) -> Path:
    """The model of this size as a file of ``kind``, made where it is missing.

    One of `FORMATS`, or of `four_bits.KINDS`.
    """
    if kind in four_bits.KINDS:
        return four_bits.quantized(file_of(folder, size, "bfloat16"), kind)
    file_format, dtype, ending = FORMATS[kind]

    def write(path: Path) -> None:
        command = ["server.cli.main", "export", str(checkpoint(folder, size)), str(path)]
        options = ["--format", file_format, "--dtype", dtype]
        subprocess.run([sys.executable, "-m", *command, *options], cwd=ROOT, check=True)

    return make_once(folder / f"{size}-{ending}", write)


def checkpoint(folder: Path, size: str) -> Path:
    """A folder of ours with random bfloat16 weights and the World tokenizer."""
    config = CONFIGS[size]

    def write(path: Path) -> None:
        path.mkdir()
        config.save(path / "config.json")
        save_file(random_weights(config), path / "model.safetensors")
        shutil.copy(PUBLISHED, path)

    return make_once(folder / size, write)


def random_weights(config: Rwkv7Config) -> dict[str, Tensor]:
    """Weights by our names, the same every time, in the magnitudes of a trained model."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in config.weight_shapes().items():
        weight = torch.randn(shape, generator=generator)
        if "norm" in name or name.endswith(("k_k", "k_a")):
            weight = weight * 0.1 + (not name.endswith("bias"))
        elif name.endswith("shift_mix"):
            weight = weight.sigmoid()
        elif len(shape) > 1:
            weight /= math.sqrt(shape[-1])
            if name.endswith(INTO_RESIDUAL):  # else rounding grows from layer to layer
                weight *= 0.2
        weights[name] = weight.bfloat16()
    return weights
