"""Jamba in GGUF, dense, as llama.cpp's converter writes it.

The layers without heads of keys and values are Mamba-1. A file of a dense model has one expert.
"""

from __future__ import annotations

from model.families.jamba.config import JambaConfig
from model.families.mamba2_hybrid.names import gguf_names
from model.families.mamba2_hybrid.read import DENSE_ALONE
from model.files import ConfigError
from model.foreign.gguf_source import BOS, EOS, GgufSource
from model.foreign.hybrid_names import HybridNames, weight
from model.foreign.renamed import Renamed
from model.weights.gguf_file import GgufFile

#: The norms inside a mixer.
_NORMS = {f"{part}_norm.weight": weight(f"ssm_{part}_norm") for part in ("dt", "b", "c")}
_SHARED = gguf_names()
NAMES = HybridNames(
    ends=_SHARED.ends,
    block=_SHARED.block,
    both=_SHARED.both,
    attention=_SHARED.attention,
    other={**_SHARED.other, **_NORMS},
)


def read_gguf(file: GgufFile, name: str) -> tuple[JambaConfig, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    source = GgufSource(file, name, "jamba")
    config = _config(source, file)
    source.refuse_unknown()
    weights = Renamed(file, NAMES.parts_of(config))
    weights.check(name, config.weight_shapes(), set())
    return config, weights


def _config(source: GgufSource, file: GgufFile) -> JambaConfig:
    num_layers, size, width = source.sizes(file)
    if source.anything("expert_count") not in (None, 0, 1):
        raise ConfigError(f"{source.family}: expert_count is not supported: {DENSE_ALONE}")
    source.ignore("expert_used_count")
    kv_heads = source.per_layer("attention.head_count_kv", num_layers)
    layers = tuple(layer for layer, heads in enumerate(kv_heads) if heads)
    heads = source.integer("attention.head_count")
    head_dim = source.integer("attention.key_length", width // heads)
    source.agree("attention.value_length", head_dim)
    return JambaConfig(
        vocab_size=size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=source.integer("feed_forward_length"),
        attention_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=source.num_kv_heads(kv_heads, layers),
        head_dim=head_dim,
        inner_size=source.integer("ssm.inner_size"),
        state_size=source.integer("ssm.state_size"),
        conv_size=source.integer("ssm.conv_kernel"),
        dt_rank=source.integer("ssm.time_step_rank"),
        norm_eps=source.number("attention.layer_norm_rms_epsilon", 1e-6),
        tied="output.weight" not in file,
        bos_token_id=source.special_id(BOS, size),
        eos_token_id=source.special_id(EOS, size),
        max_context=source.integer("context_length"),
    )
