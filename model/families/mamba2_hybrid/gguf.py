"""Granite 4.0-H, Nemotron-H and Falcon-H1 in GGUF, dense, as llama.cpp's converter writes them.

In files of the first two the rows of q and k lie in pairs, although the models have no positions.
Falcon-H1's multipliers are those of the weights already.
"""

from __future__ import annotations

from typing import Any

from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.mamba2_hybrid.names import gguf_names
from model.families.mamba2_hybrid.read import DENSE_ALONE
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
    family = str(file.metadata["general.architecture"])
    source = GgufSource(file, name, family)
    names = gguf_names()
    shared = _shared(source, file)
    if family == "granitehybrid":
        config = _granite(source, shared)
        names = gguf_names(source.scale("logit_scale"))
    elif family == "nemotron_h":
        config = _nemotron(source, shared)
    else:
        config = _falcon_h1(source, shared, file)
        names = gguf_names(mlp_norm="ffn_norm")
    source.refuse_unknown()
    tensors = file if family == "falcon-h1" else PairedRows(file, config)
    weights = Renamed(tensors, names.parts_of(config))
    weights.check(name, config.weight_shapes(), set())
    return config, weights


def _shared(source: GgufSource, file: GgufFile) -> dict[str, Any]:
    """What all say in the same way."""
    num_layers, size, width = source.sizes(file)
    if source.anything("expert_count"):
        raise ConfigError(f"{source.family}: expert_count is not supported: {DENSE_ALONE}")
    source.ignore(*HARMLESS)
    # Nemotron-H's files may have but the second, as its configs do.
    eps = source.number("attention.layer_norm_epsilon", 1e-5)
    eps = source.number("attention.layer_norm_rms_epsilon", eps)
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
        "rope_theta": source.number("rope.freq_base", 1e4),
        "num_mamba_heads": mamba_heads,
        "mamba_head_dim": inner // mamba_heads,
        "state_size": source.integer("ssm.state_size"),
        "num_groups": source.integer("ssm.group_count"),
        "conv_size": source.integer("ssm.conv_kernel"),
        "norm_eps": eps,
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
        embedding_scale=source.scale("embedding_scale"),
        residual_scale=source.scale("residual_scale"),
        attention_scale=source.number("attention.scale", 0.0),
    )


def _nemotron(source: GgufSource, shared: dict[str, Any]) -> Mamba2HybridConfig:
    source.ignore("rope.dimension_count")  # there are no positions
    source.choice("rope.scaling.finetuned", False)
    num_layers, attention = shared["num_hidden_layers"], set(shared["attention_layers"])
    sizes = source.per_layer("feed_forward_length", num_layers)
    inner = {size for size in sizes if size}
    if len(inner) != 1 or any(sizes[layer] for layer in attention):
        raise ConfigError(
            f"{source.family}: feed_forward_length must be one number in some layers that are not"
            " attention, and 0 in the others"
        )
    mamba = (layer for layer in range(num_layers) if not sizes[layer] and layer not in attention)
    return Mamba2HybridConfig(**shared, mamba_layers=tuple(mamba), intermediate_size=inner.pop())


def _falcon_h1(source: GgufSource, shared: dict[str, Any], file: GgufFile) -> Mamba2HybridConfig:
    head_dim = shared["head_dim"]
    source.agree("rope.dimension_count", head_dim)
    layers = tuple(range(shared["num_hidden_layers"]))
    if shared["attention_layers"] != layers:
        raise ConfigError(f"{source.family}: attention.head_count_kv must not be 0 in any layer")
    return Mamba2HybridConfig(
        **shared,
        mamba_layers=layers,
        intermediate_size=source.integer("feed_forward_length"),
        rotary_dim=head_dim,
        mixer_norm="blk.0.ssm_norm.weight" in file,
    )
