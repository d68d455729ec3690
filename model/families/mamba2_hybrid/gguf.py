"""Granite 4.0-H in GGUF, dense, as llama.cpp's converter writes it.

The rows of q and k lie in pairs, with rotary positions or without.
"""

from __future__ import annotations

from typing import Any

from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.mamba2_hybrid.read import gguf_names
from model.files import ConfigError
from model.foreign.gguf_source import BOS, EOS, GgufSource
from model.foreign.paired_rows import PairedRows
from model.foreign.renamed import Renamed
from model.weights.gguf_file import GgufFile

#: Sizes of experts, of which there are none.
HARMLESS = ("expert_used_count", "expert_shared_feed_forward_length")


def read_gguf(file: GgufFile, name: str) -> tuple[Mamba2HybridConfig, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    source = GgufSource(file, name, "granitehybrid")
    names = gguf_names(source.scale("logit_scale"))
    config = _granite(source, _shared(source, file))
    source.refuse_unknown()
    weights = Renamed(PairedRows(file, config), names.parts_of(config))
    weights.check(name, config.weight_shapes(), set())
    return config, weights


def _shared(source: GgufSource, file: GgufFile) -> dict[str, Any]:
    """What all families of hybrids say in the same way."""
    num_layers, size, width = source.sizes(file)
    if source.anything("expert_count"):
        raise ConfigError(
            f"{source.family}: expert_count is not supported: only the dense ones of this family"
            " are"
        )
    source.ignore(*HARMLESS)
    kv_heads = source.per_layer("attention.head_count_kv", num_layers)
    layers = tuple(layer for layer, heads in enumerate(kv_heads) if heads)
    heads = source.integer("attention.head_count")
    inner, mamba_heads = source.integer("ssm.inner_size"), source.integer("ssm.time_step_rank")
    if inner % mamba_heads:
        raise ConfigError(
            f"{source.family}: ssm.time_step_rank must divide {inner}, not {mamba_heads}"
        )
    head_dim = source.integer("attention.key_length", width // heads)
    source.agree("attention.value_length", head_dim)
    return {
        "vocab_size": size,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "attention_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": source.num_kv_heads(kv_heads, layers),
        "head_dim": head_dim,
        "num_mamba_heads": mamba_heads,
        "mamba_head_dim": inner // mamba_heads,
        "state_size": source.integer("ssm.state_size"),
        "num_groups": source.integer("ssm.group_count"),
        "conv_size": source.integer("ssm.conv_kernel"),
        "norm_eps": source.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tied": "output.weight" not in file,
        "bos_token_id": source.special_id(BOS, size),
        "eos_token_id": source.special_id(EOS, size),
        "max_context": source.integer("context_length"),
    }


def _granite(source: GgufSource, shared: dict[str, Any]) -> Mamba2HybridConfig:
    head_dim = shared["head_dim"]
    source.agree("rope.dimension_count", head_dim)
    return Mamba2HybridConfig(
        **shared,
        intermediate_size=source.integer("feed_forward_length"),
        # So llama.cpp says whether there are positions.
        rotary_dim=head_dim if source.boolean("rope.scaling.finetuned", True) else 0,
        rope_theta=source.number("rope.freq_base", 1e4),
        embedding_scale=source.scale("embedding_scale"),
        residual_scale=source.scale("residual_scale"),
        attention_scale=source.number("attention.scale", 0.0),
    )
