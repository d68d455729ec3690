"""LFM2 in GGUF, as llama.cpp's converter writes it."""

from __future__ import annotations

from model.families.lfm2.config import Lfm2Config
from model.families.lfm2.read import GGUF
from model.files import ConfigError
from model.foreign.gguf_source import BOS, EOS, GgufSource
from model.foreign.renamed import Renamed
from model.weights.gguf_file import GgufFile


def read_gguf(file: GgufFile, name: str) -> tuple[Lfm2Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    config = _config(GgufSource(file, name, "lfm2"), file)
    weights = Renamed(file, GGUF.parts_of(config))
    weights.check(name, config.weight_shapes(), frozenset())
    return config, weights


def _config(source: GgufSource, file: GgufFile) -> Lfm2Config:
    name = source.family
    num_layers, size, width = source.sizes(file)
    if "attention.sliding_window" in source:
        raise ConfigError(
            f"{name}: attention.sliding_window is not supported: it is of models that hear"
        )
    kv_heads = source.per_layer("attention.head_count_kv", num_layers)
    layers = tuple(layer for layer, heads in enumerate(kv_heads) if heads)
    heads = source.integer("attention.head_count")
    config = Lfm2Config(
        vocab_size=size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=source.integer("feed_forward_length"),
        attention_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=source.num_kv_heads(kv_heads, layers),
        head_dim=width // heads,
        rope_theta=source.number("rope.freq_base", 1e6),
        conv_size=source.integer("shortconv.l_cache"),
        norm_eps=source.number("attention.layer_norm_rms_epsilon", 1e-5),
        tied="output.weight" not in file,
        bos_token_id=source.special_id(BOS, size),
        eos_token_id=source.special_id(EOS, size),
        max_context=source.integer("context_length"),
    )
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        source.agree(key, config.head_dim)
    source.refuse_unknown()
    return config
