"""GGUF files of models with a bounded past, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType
from gguf.quants import quantize

from model.architectures.hybrid import BoundedConfig
from model.families.jamba.config import JambaConfig
from model.families.lfm2.config import Lfm2Config
from model.families.llama.config import LlamaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.qwen35.config import Qwen35Config
from tests.gguf_files import Fill, Tensors, finish
from tests.hybrids import HYBRIDS, theirs
from tests.mamba2_hybrid_gguf import mamba2_hybrid_fields, mamba2_hybrid_tensors

_QWEN = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_LFM2 = {
    "operator_norm": "attn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
}
_LLAMA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
}
_JAMBA = {
    "input_layernorm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "mamba.conv1d": "ssm_conv1d",
    **{f"mamba.{name}_proj": f"ssm_{name}" for name in ("in", "x", "dt", "out")},
    **{f"mamba.{name}_layernorm": f"ssm_{name}_norm" for name in ("dt", "b", "c")},
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
_PARTS = {"qwen3_5_text": _QWEN, "lfm2": _LFM2, "jamba": _JAMBA}
#: Their ``model_type`` -> ``general.architecture``, where it is another.
_NAMES = {
    "qwen3_5_text": "qwen35",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
}
#: Numbers of heads or channels, which have no kind.
_NUMBERS = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
#: Tensors that no quantisation touches, besides vectors.
_WIDE = ("ssm_conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d")


def hybrid_tensors(name: str) -> Tensors:
    """The tensors of one of `HYBRIDS`, in float32."""
    if isinstance(HYBRIDS[name].config, Mamba2HybridConfig):
        return mamba2_hybrid_tensors(name)
    return _tensors(name)


def _tensors(name: str) -> Tensors:
    config, family = HYBRIDS[name].config, HYBRIDS[name].family
    is_qwen = isinstance(config, Qwen35Config)
    ends = {
        "embed_tokens": "token_embd",
        **dict.fromkeys(("norm", "final_layernorm"), "output_norm"),
        "embedding_norm": "token_embd_norm",
    }
    tensors: Tensors = {}
    for key, tensor in theirs(name).state_dict().items():
        data = tensor.numpy()
        if key == "lm_head.weight":
            if not config.tied:
                tensors["output.weight"] = data
            continue
        *path, kind = key.removeprefix("model.").split(".")
        if is_qwen and path[-1].endswith("norm") and path[-2:] != ["linear_attn", "norm"]:
            data = data + 1
        if path[0] != "layers":
            tensors[f"{ends[path[0]]}.{kind}"] = data
            continue
        block, part = f"blk.{path[1]}", ".".join(path[2:])
        if kind in _NUMBERS:
            key, data = _NUMBERS[kind], -np.exp(data) if kind == "A_log" else data
            tensors[f"{block}.{key}"] = _tiled(config, key.removesuffix(".bias"), data)
            continue
        found = _PARTS.get(family, _LLAMA).get(part)
        if found is None:
            found = part.replace("self_attn.", "attn_").replace("mlp.", "ffn_")
            found = found.removesuffix("_proj")
        if data.ndim == 3:
            data = data.squeeze(1)
        if family in ("llama", "smollm3") and found in ("attn_q", "attn_k"):
            data = _in_pairs(config, data)
        tensors[f"{block}.{found}.{kind}"] = _tiled(config, found, data)
    if isinstance(config, LlamaConfig) and config.rope_factors:
        tensors["rope_freqs.weight"] = np.array(config.rope_factors, np.float32)
    return tensors


def _in_pairs(config: BoundedConfig, data: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """With the rows that turn together next to each other."""
    halves = data.reshape(-1, 2, config.head_dim // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape)


def _tiled(
    config: BoundedConfig, name: str, data: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """With value heads in the order of the file."""
    if not isinstance(config, Qwen35Config):
        return data
    groups, heads, size = config.num_key_heads, config.num_value_heads, config.value_head_dim

    def tiled(rows: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
        shape = (groups, heads // groups, size, *rows.shape[1:])
        return rows.reshape(shape).swapaxes(0, 1).reshape(rows.shape)

    if name in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
        return tiled(data, 1)
    if name == "attn_gate":
        return tiled(data, size)
    if name == "ssm_out":
        return tiled(data.T, size).T
    if name in ("attn_qkv", "ssm_conv1d"):
        keys = 2 * groups * config.key_head_dim
        return np.concatenate([data[:keys], tiled(data[keys:], size)])
    return data


def hybrid_fields(name: str) -> dict[str, Any]:
    """The metadata of one of `HYBRIDS`, without the family's name in front."""
    config = HYBRIDS[name].config
    fields: dict[str, Any] = {
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    if isinstance(config, Mamba2HybridConfig):
        return fields | mamba2_hybrid_fields(name)
    if isinstance(config, JambaConfig):
        return fields | {
            "vocab_size": config.vocab_size,
            "rope.freq_base": None,
            "attention.head_count_kv": [
                config.num_key_value_heads * attention for attention in config.is_attention
            ],
            "ssm.conv_kernel": config.conv_size,
            "ssm.inner_size": config.inner_size,
            "ssm.state_size": config.state_size,
            "ssm.time_step_rank": config.dt_rank,
            "expert_count": 1,
            "expert_used_count": 1,
        }
    if isinstance(config, Lfm2Config):
        heads = [config.num_key_value_heads * attention for attention in config.is_attention]
        return fields | {
            "vocab_size": config.vocab_size,
            "attention.head_count_kv": heads,
            "shortconv.l_cache": config.conv_size,
        }
    if isinstance(config, LlamaConfig):
        return fields | {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
        }
    assert isinstance(config, Qwen35Config)
    half = config.rotary_dim // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3, 0]
    return fields | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "full_attention_interval": config.attention_layers[0] + 1,
        "rope.dimension_count": config.rotary_dim,
        "rope.dimension_sections": sections,
        "ssm.conv_kernel": config.conv_size,
        "ssm.state_size": config.key_head_dim,
        "ssm.group_count": config.num_key_heads,
        "ssm.time_step_rank": config.num_value_heads,
        "ssm.inner_size": config.value_channels,
    }


def write_hybrid(
    path: Path,
    name: str,
    kind: str = "F32",
    fill: Fill | None = None,
    change: dict[str, Any] | None = None,
    tensors: Tensors | None = None,
) -> Path:
    """The file of one of `HYBRIDS`; matrices as ``kind``, the rest as F32.

    ``change`` has other values of the metadata; None leaves a key out.
    """
    family = _NAMES.get(HYBRIDS[name].family, HYBRIDS[name].family)
    writer = GGUFWriter(path, family)
    for key, value in (hybrid_fields(name) | (change or {})).items():
        if isinstance(value, list):
            writer.add_array(f"{family}.{key}", value)
        elif isinstance(value, bool | int | float | str):
            kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32}
            kinds |= {float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
            writer.add_key_value(f"{family}.{key}", value, kinds[type(value)])
    if fill is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        fill(writer)
    for key, data in (hybrid_tensors(name) if tensors is None else tensors).items():
        fits = data.ndim == 2 and not key.endswith(_WIDE) and "norm" not in key
        type_ = GGMLQuantizationType[kind if fits else "F32"]
        writer.add_tensor(key, quantize(np.ascontiguousarray(data), type_), raw_dtype=type_)
    finish(writer)
    return path


def numbered_vocabulary(size: int) -> Fill:
    """A vocabulary in which every id is whole characters, so that none waits for the next."""

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{id}" for id in range(size)])
        writer.add_token_types([TokenType.NORMAL] * size)
        writer.add_token_merges(["t 1"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)

    return fill
