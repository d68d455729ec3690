"""Hybrids in published shapes: GGUF files of random weights, and what a step costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

from benchmarks.checkpoints import four_bits
from benchmarks.decode.peers import PREFILL_TOKENS, Point
from benchmarks.decode.roofline import ITEM_BYTES, Cost, matrix_cost
from benchmarks.process import make_once
from model.architectures.hybrid import HybridConfig
from model.families.lfm2 import read as lfm2_read
from model.families.lfm2.config import Lfm2Config
from model.families.mamba2_hybrid import read as mamba2_read
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.qwen35 import read as qwen35_read
from model.families.qwen35.config import Qwen35Config
from model.foreign.hybrid_names import HybridNames
from model.state import StateLayout

#: Of 42 layers of Nemotron-3-Nano-4B, so many are in a file: `M` is a Mamba-2, `*` attention, and
#: `-` an MLP.
NEMOTRON = "M-M-M-MM-M-M*-"
#: Positions of a session, ours and llama.cpp's: the longest past, and what is decoded meanwhile.
ROOM = 1024
CONTEXT = 4096 + ROOM
CONFIGS: dict[str, HybridConfig] = {
    "qwen35-0.8B": Qwen35Config(
        vocab_size=248320, attention_layers=tuple(range(3, 24, 4)), max_context=CONTEXT
    ),
    "lfm2-350M": Lfm2Config(
        vocab_size=65536, attention_layers=(2, 5, 8, 10, 12, 14), max_context=CONTEXT
    ),
    "granite-4.0-h-350M": Mamba2HybridConfig(
        vocab_size=100352,
        attention_layers=(10, 13, 17, 27),
        embedding_scale=12.0,
        residual_scale=0.246,
        attention_scale=0.015625,
        max_context=CONTEXT,
    ),
    "nemotron-3-nano-4B, 14 layers": Mamba2HybridConfig(
        vocab_size=131072,
        hidden_size=3136,
        num_hidden_layers=len(NEMOTRON),
        intermediate_size=12544,
        attention_layers=tuple(i for i, kind in enumerate(NEMOTRON) if kind == "*"),
        mamba_layers=tuple(i for i, kind in enumerate(NEMOTRON) if kind == "M"),
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        num_mamba_heads=96,
        mamba_head_dim=80,
        num_groups=8,
        tied=False,
        max_context=CONTEXT,
    ),
}
#: Of a number of a head's S in one token: two multiplications with the decay and what is read, two
#: read-outs and one update, each with an addition.
OPERATIONS_PER_STATE_NUMBER = 8
#: By our types; the others are llama.cpp's, which makes those of `four_bits.KINDS` itself.
FILE_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
#: Tensors that stay float32, as in published files.
WIDE = ("ssm_conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d", "ssm_norm.weight")
#: Numbers of heads of Mamba-2, which are columns.
HEADS = ("ssm_a", "ssm_d")


def file_of(folder: Path, size: str, dtype: str) -> Path:
    """The model of `CONFIGS` as a GGUF file whose tokens are numbers, made where it is missing."""
    if dtype in four_bits.KINDS:
        return four_bits.quantized(file_of(folder, size, "bfloat16"), dtype)
    file_type = FILE_TYPES[dtype]

    def write(path: Path) -> None:
        config = CONFIGS[size]
        family = architecture(config)
        writer = GGUFWriter(path, family)
        for key, value in _fields(config).items():
            add = writer.add_array if isinstance(value, list) else _adder(writer, value)
            add(f"{family}.{key}", value)
        kind = f"{'ALL' if file_type == 'F32' else 'MOSTLY'}_{file_type}"
        writer.add_file_type(LlamaFileType[kind])
        _add_vocabulary(writer, config.vocab_size)
        draw = np.random.default_rng(0)
        parts, shapes = _names(config).parts_of(config), config.weight_shapes()
        for ours, part in parts.items():
            (key,) = part.keys
            values = _values(ours, shapes[ours], draw)
            if isinstance(config, Mamba2HybridConfig):
                if key.endswith(HEADS):
                    values = values[:, None]
                elif key.endswith("ssm_norm.weight"):
                    values = values.reshape(config.num_groups, -1)
            is_wide = values.ndim != 2 or key.endswith(WIDE)
            raw = GGMLQuantizationType["F32" if is_wide else file_type]
            writer.add_tensor(key, quantize(values, raw), raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return make_once(folder / f"{size}-{file_type}.gguf", write)


def architecture(config: HybridConfig) -> str:
    """What GGUF calls the family."""
    if isinstance(config, Mamba2HybridConfig):
        return "granitehybrid" if config.ends_with_mlp else "nemotron_h"
    return config.attention


def _names(config: HybridConfig) -> HybridNames:
    if isinstance(config, Mamba2HybridConfig):
        return mamba2_read.gguf_names()
    return qwen35_read.GGUF if isinstance(config, Qwen35Config) else lfm2_read.GGUF


def _values(
    name: str, shape: tuple[int, ...], draw: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Of a weight by our name, as the file has it, in the magnitudes of a trained model."""
    values = draw.standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("A_log"):
        return -np.exp(0.7 * values - 2)
    if len(shape) == 2:
        values *= 0.5 if name.endswith("conv") else shape[1] ** -0.5
        if name.endswith(("out.weight", "down.weight")):  # else rounding grows from layer to layer
            values *= 0.2
    return values


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    merged = ["t", "1", "t1"]  # a reader wants merges, and their tokens
    writer.add_token_list(["t0", *merged, *(f"t{id}" for id in range(4, size))])
    writer.add_token_types([TokenType.NORMAL] * size)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _adder(writer: GGUFWriter, value: Any) -> Any:
    if isinstance(value, bool):
        return writer.add_bool
    return writer.add_float32 if isinstance(value, float) else writer.add_uint32


def _fields(config: HybridConfig) -> dict[str, Any]:
    """The metadata, without the family's name in front."""
    fields: dict[str, Any] = {
        "context_length": 1 << 17,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    if isinstance(config, Lfm2Config):
        return fields | {
            "attention.head_count_kv": [
                config.num_key_value_heads * attention for attention in config.is_attention
            ],
            "shortconv.l_cache": config.conv_size,
        }
    if isinstance(config, Mamba2HybridConfig):
        return fields | _mamba2_fields(config)
    assert isinstance(config, Qwen35Config)
    return fields | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "full_attention_interval": config.attention_layers[0] + 1,
        "rope.dimension_count": config.rotary_dim,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": config.conv_size,
        "ssm.state_size": config.key_head_dim,
        "ssm.group_count": config.num_key_heads,
        "ssm.time_step_rank": config.num_value_heads,
        "ssm.inner_size": config.value_channels,
    }


def _mamba2_fields(config: Mamba2HybridConfig) -> dict[str, Any]:
    kinds = list(zip(config.is_attention, config.is_mamba, strict=True))
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": [config.num_key_value_heads * kind[0] for kind in kinds],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.conv_size,
        "ssm.state_size": config.state_size,
        "ssm.group_count": config.num_groups,
        "ssm.inner_size": config.mamba.inner_size,
        "ssm.time_step_rank": config.num_mamba_heads,
    }
    if not config.ends_with_mlp:
        inner = [config.intermediate_size * (not any(kind)) for kind in kinds]
        eps = config.norm_eps  # llama.cpp asks for both names
        return fields | {"feed_forward_length": inner, "attention.layer_norm_epsilon": eps}
    return fields | {
        "attention.scale": config.attention_scale,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1.0,
    }


def step_cost(point: Point, position_bytes: int) -> Cost:
    """Of a step at ``point``; a position of all layers takes ``position_bytes``."""
    config = CONFIGS[point.size]
    layout, layers = StateLayout.of(config), len(config.attention_layers)
    is_prefill = point.mode == "prefill"
    rows = PREFILL_TOKENS if is_prefill else point.streams
    seen = PREFILL_TOKENS // 2 if is_prefill else point.context + 1
    shapes = config.weight_shapes() | {"head.weight": (config.vocab_size, config.hidden_size)}
    sums = sum(math.prod(f.spec.shape) for f in layout.fields if f.name == "S")
    heads = config.num_attention_heads * config.head_dim
    return matrix_cost(shapes, ITEM_BYTES[point.dtype], rows, point.streams, "embedding") + Cost(
        point.streams * (2 * layout.fixed_bytes + seen * position_bytes),
        rows * (OPERATIONS_PER_STATE_NUMBER * sums + 4 * layers * heads * seen),
    )


def position_numbers(config: HybridConfig) -> int:
    """Numbers of keys and values of a position, in all layers."""
    return 2 * len(config.attention_layers) * config.num_key_value_heads * config.head_dim
