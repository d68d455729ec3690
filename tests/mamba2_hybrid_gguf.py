"""What llama.cpp's converter makes of hybrids over Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from tests.gguf_files import Tensors
from tests.hybrids import FALCON, HYBRIDS, theirs

Array = npt.NDArray[np.float32]

_ENDS = {
    **dict.fromkeys(("embed_tokens", "embeddings"), "token_embd"),
    **dict.fromkeys(("norm", "norm_f", "final_layernorm"), "output_norm"),
    "lm_head": "output",
}
#: Parts of a layer by their names, without ``mamba``, ``self_attn`` or ``mixer`` in front.
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"{name}_proj": f"attn_{name}" for name in "qkv"},
    "o_proj": "attn_output",
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
    "shared_mlp.output_linear": "ffn_down",
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"{name}_proj": f"ffn_{name}" for name in ("up", "down")},
}
#: Numbers of heads, which have no kind.
_HEADS = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}


def mamba2_hybrid_tensors(name: str) -> Tensors:
    """The tensors of one of `HYBRIDS` that is a hybrid over Mamba-2, in float32."""
    hybrid = HYBRIDS[name]
    assert isinstance(hybrid.config, Mamba2HybridConfig)
    tensors: Tensors = {}
    for key, tensor in theirs(name).state_dict().items():
        data = tensor.numpy()
        *path, kind = key.removeprefix("model.").split(".")
        if hybrid.family == "falcon_h1":
            data = _multiplied(hybrid.config, key, data)
        if path[0] != "layers":
            if path[0] != "lm_head" or not hybrid.config.tied:
                tensors[f"{_ENDS[path[0]]}.{kind}"] = data
            continue
        in_pairs = hybrid.family != "falcon_h1"
        for found, each in _converted(hybrid.config, ".".join(path[2:]), kind, data, in_pairs):
            tensors[f"blk.{path[1]}.{found}"] = each
    return tensors


def _multiplied(config: Mamba2HybridConfig, key: str, data: Array) -> Array:
    """With Falcon-H1's multipliers."""
    by: dict[str, float] = {
        "down_proj": FALCON["mlp_multipliers"][1],
        "gate_proj": FALCON["mlp_multipliers"][0],
        "k_proj": FALCON["key_multiplier"] * FALCON["attention_in_multiplier"],
        "q_proj": FALCON["attention_in_multiplier"],
        "v_proj": FALCON["attention_in_multiplier"],
        "o_proj": FALCON["attention_out_multiplier"],
        "out_proj": FALCON["ssm_out_multiplier"],
        "lm_head": FALCON["lm_head_multiplier"],
        "embed_tokens": config.embedding_scale,
    }
    part = key.split(".")[-2]
    if part != "in_proj":
        return data * np.float32(by.get(part, 1.0))
    inner, writes = config.mamba.inner_size, config.num_groups * config.state_size
    sizes = (inner, inner, writes, writes, config.num_mamba_heads)
    factors = np.repeat(
        np.float32(FALCON["ssm_in_multiplier"]) * np.array(FALCON["ssm_multipliers"], np.float32),
        sizes,
    )
    rows: Array = data * factors[:, None]
    return rows


def _converted(
    config: Mamba2HybridConfig, part: str, kind: str, data: Array, in_pairs: bool
) -> Iterator[tuple[str, Array]]:
    """The tensors that one of a layer becomes, by their names."""
    is_norm_of_block = part == "norm"
    for prefix in ("mamba.", "self_attn.", "mixer."):
        part = part.removeprefix(prefix)
    if kind in _HEADS:
        data = -np.exp(data) if kind == "A_log" else data
        yield _HEADS[kind], data if kind == "dt_bias" else data[:, None]
    elif part == "shared_mlp.input_linear":
        for name, half in zip(("gate", "up"), np.split(data, 2), strict=True):
            yield f"ffn_{name}.{kind}", half
    elif part == "pre_ff_layernorm":
        yield "ffn_norm", data
    else:
        found = "attn_norm" if is_norm_of_block else _PARTS[part]
        if found == "ssm_norm":
            data = data.reshape(config.num_groups, -1)
        if in_pairs and found in ("attn_q", "attn_k"):  # rows that turn together are neighbours
            halves = data.reshape(-1, 2, config.head_dim // 2, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        yield f"{found}.{kind}", data.squeeze(1) if data.ndim == 3 else data


def mamba2_hybrid_fields(name: str) -> dict[str, Any]:
    """The metadata beyond what all hybrids have."""
    config, family = HYBRIDS[name].config, HYBRIDS[name].family
    assert isinstance(config, Mamba2HybridConfig)
    heads = [config.num_key_value_heads * attention for attention in config.is_attention]
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": heads,
        "rope.dimension_count": config.head_dim,
    }
    scales = {
        "attention.scale": config.attention_scale,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": HYBRIDS[name].theirs.get("logits_scaling"),
    }
    if family == "granite":
        return fields | scales | {"attention.head_count_kv": config.num_key_value_heads}
    fields |= {
        "ssm.conv_kernel": config.conv_size,
        "ssm.state_size": config.state_size,
        "ssm.group_count": config.num_groups,
        "ssm.inner_size": config.mamba.inner_size,
        "ssm.time_step_rank": config.num_mamba_heads,
    }
    lengths = {f"attention.{part}_length": config.head_dim for part in ("key", "value")}
    if family == "falcon_h1":
        return fields | lengths | {"attention.head_count_kv": config.num_key_value_heads}
    fields["rope.scaling.finetuned"] = config.rotary_dim > 0
    if family == "nemotron_h":
        pairs = zip(config.is_attention, config.is_mamba, strict=True)
        inner = [config.intermediate_size * (not any(pair)) for pair in pairs]
        epsilon = {"attention.layer_norm_epsilon": config.norm_eps}
        return fields | lengths | epsilon | {"feed_forward_length": inner}
    return (
        fields
        | scales
        | {
            "expert_count": 0,
            "expert_used_count": 0,
            "expert_shared_feed_forward_length": config.intermediate_size,
        }
    )
