"""What llama.cpp's converter makes of hybrids over Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from tests.gguf_files import Tensors
from tests.hybrids import HYBRIDS, theirs

Array = npt.NDArray[np.float32]

_ENDS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
#: Parts of a layer by their names, without the ``mamba`` or ``self_attn`` in front.
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
}
#: Numbers of heads, which have no kind.
_HEADS = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}


def mamba2_hybrid_tensors(name: str) -> Tensors:
    """The tensors of one of `HYBRIDS` that is a hybrid over Mamba-2, in float32."""
    config = HYBRIDS[name].config
    assert isinstance(config, Mamba2HybridConfig)
    tensors: Tensors = {}
    for key, tensor in theirs(name).state_dict().items():
        *path, kind = key.removeprefix("model.").split(".")
        if path[0] != "layers":
            if path[0] != "lm_head" or not config.tied:
                tensors[f"{_ENDS[path[0]]}.{kind}"] = tensor.numpy()
            continue
        for found, data in _converted(config, ".".join(path[2:]), kind, tensor.numpy()):
            tensors[f"blk.{path[1]}.{found}"] = data
    return tensors


def _converted(
    config: Mamba2HybridConfig, part: str, kind: str, data: Array
) -> Iterator[tuple[str, Array]]:
    """The tensors that one of a layer becomes, by their names."""
    part = part.removeprefix("mamba.").removeprefix("self_attn.")
    if kind in _HEADS:
        data = -np.exp(data) if kind == "A_log" else data
        yield _HEADS[kind], data if kind == "dt_bias" else data[:, None]
    elif part == "shared_mlp.input_linear":
        for name, half in zip(("gate", "up"), np.split(data, 2), strict=True):
            yield f"ffn_{name}.{kind}", half
    else:
        found = _PARTS[part]
        if found == "ssm_norm":
            data = data.reshape(config.num_groups, -1)
        if found in ("attn_q", "attn_k"):  # rows that turn together lie next to each other
            halves = data.reshape(-1, 2, config.head_dim // 2, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        yield f"{found}.{kind}", data.squeeze(1) if data.ndim == 3 else data


def mamba2_hybrid_fields(name: str) -> dict[str, Any]:
    """The metadata beyond what all hybrids have."""
    config, theirs = HYBRIDS[name].config, HYBRIDS[name].theirs
    assert isinstance(config, Mamba2HybridConfig)
    heads = [config.num_key_value_heads * attention for attention in config.is_attention]
    return {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": heads,
        "attention.scale": config.attention_scale,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": theirs["logits_scaling"],
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "rope.dimension_count": config.head_dim,
        "rope.scaling.finetuned": config.rotary_dim > 0,
        "ssm.conv_kernel": config.conv_size,
        "ssm.state_size": config.state_size,
        "ssm.group_count": config.num_groups,
        "ssm.inner_size": config.mamba.inner_size,
        "ssm.time_step_rank": config.num_mamba_heads,
    }
