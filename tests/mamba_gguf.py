"""GGUF files of `tests.mamba`'s models as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from model.families.mamba.config import Mamba2Config
from tests.gguf_files import Fill, Tensors, finish
from tests.mamba import SHAPES, Config, Weights, drawn

_IN_BLOCK = {
    "mixer_norm.weight": "attn_norm.weight",
    "mixer.in.weight": "ssm_in.weight",
    "mixer.conv": "ssm_conv1d.weight",
    "mixer.conv_bias": "ssm_conv1d.bias",
    "mixer.x.weight": "ssm_x.weight",
    "mixer.dt.weight": "ssm_dt.weight",
    "mixer.dt.bias": "ssm_dt.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out.weight": "ssm_out.weight",
}
_ENDS = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
}
#: Matrices that llama.cpp keeps in float32 whatever is asked for.
_WIDE = ("ssm_conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight")


def family_of(config: Config) -> str:
    return "mamba2" if isinstance(config, Mamba2Config) else "mamba"


def mamba_tensors(config: Config, weights: Weights) -> Tensors:
    """The tensors by their names in GGUF, in float32."""
    tensors: Tensors = {}
    for name, data in weights.items():
        if name in _ENDS:
            tensors[_ENDS[name]] = data
            continue
        _, layer, rest = name.split(".", 2)
        if rest == "mixer.A_log":
            data = -np.exp(data)
        if isinstance(config, Mamba2Config) and rest in ("mixer.A_log", "mixer.D"):
            data = data[:, None]
        if rest == "mixer.norm.weight":
            assert isinstance(config, Mamba2Config)
            data = data.reshape(config.num_groups, -1)
        tensors[f"blk.{layer}.{_IN_BLOCK[rest]}"] = data
    return tensors


def mamba_fields(config: Config) -> dict[str, Any]:
    """The metadata, without the family's name in front."""
    fields: dict[str, Any] = {
        "context_length": 1 << 20,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "ssm.conv_kernel": config.conv_size,
        "ssm.inner_size": config.inner_size,
        "ssm.state_size": config.state_size,
    }
    if isinstance(config, Mamba2Config):
        heads, groups = config.num_attention_heads, config.num_groups
        return fields | {"ssm.time_step_rank": heads, "ssm.group_count": groups}
    return fields | {"ssm.time_step_rank": config.dt_rank, "ssm.dt_b_c_rms": config.mixer_norm}


def write_mamba(
    path: Path,
    name: str,
    kind: str = "F32",
    fill: Fill | None = None,
    change: dict[str, Any] | None = None,
    tensors: Tensors | None = None,
) -> Path:
    """The file of one of `SHAPES`; matrices as ``kind``, the rest as F32.

    ``change`` has other values of the metadata; None leaves a key out.
    """
    config = SHAPES[name]
    family = family_of(config)
    writer = GGUFWriter(path, family)
    for key, value in (mamba_fields(config) | (change or {})).items():
        kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32}
        kinds |= {float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
        if value is not None:
            writer.add_key_value(f"{family}.{key}", value, kinds[type(value)])
    if fill is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        fill(writer)
    for key, data in (mamba_tensors(config, drawn(name)) if tensors is None else tensors).items():
        fits = data.ndim == 2 and not key.endswith(_WIDE)
        fits = fits and (kind not in ("Q8_0", "Q4_0") or data.shape[1] % 32 == 0)
        type_ = GGMLQuantizationType[kind if fits else "F32"]
        writer.add_tensor(key, quantize(np.ascontiguousarray(data), type_), raw_dtype=type_)
    finish(writer)
    return path
