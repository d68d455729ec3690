"""Jamba, dense, in its Hugging Face layout and in GGUF, as llama.cpp's converter writes it."""

from __future__ import annotations

from model.families.jamba.config import JambaConfig
from model.families.mamba.read import rank
from model.families.mamba2_hybrid.read import (
    DENSE_ALONE,
    FOLDER_ATTENTION,
    FOLDER_MAMBA,
    PATTERNS,
    gguf_names,
    inside,
    kinds_of_layers,
)
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.gguf import GgufSource
from model.foreign.hybrid_names import HybridNames, refuse_other_head, weight
from model.foreign.weights import Part, Renamed, Weights
from model.weights import file_name
from model.weights.gguf_file import GgufFile

#: What kernels use, which logits are computed, and what is said of experts where there are none.
HARMLESS = (
    *("use_mamba_kernels", "use_mambapy", "use_associative_scan", "n_ctx"),
    *("num_logits_to_keep", "calc_logits_for_entire_prompt"),
    *("num_experts_per_tok", "expert_layer_period", "expert_layer_offset"),
)
#: The norms inside a mixer, in folders.
_NORMS = {f"{part}_norm.weight": weight(f"{part}_layernorm") for part in ("dt", "b", "c")}
FOLDER = HybridNames(
    ends={
        "embedding.weight": weight("model.embed_tokens"),
        "norm.weight": weight("model.final_layernorm"),
        "head.weight": weight("lm_head"),
    },
    block="model.layers.{}",
    both={
        "mixer_norm.weight": weight("input_layernorm"),
        "mlp_norm.weight": weight("pre_ff_layernorm"),
        **{f"mlp.{n}.weight": weight(f"feed_forward.{n}_proj") for n in ("gate", "up", "down")},
    },
    attention=inside("self_attn", FOLDER_ATTENTION),
    other=inside("mamba", FOLDER_MAMBA | _NORMS),
)


def read_jamba(source: ForeignConfig, weights: Weights) -> tuple[JambaConfig, Renamed]:
    """A folder of ``jamba`` without experts."""
    files = weights.take_all()
    name, config = file_name(files), _config(source)
    unused = refuse_other_head(files, config, FOLDER, name)
    ours = Renamed(files, FOLDER.parts_of(config))
    ours.check(name, config.weight_shapes(), unused)
    return config, ours


def key_layouts(config: JambaConfig) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [FOLDER.parts_of(config)]


def _config(source: ForeignConfig) -> JambaConfig:
    source.rename({"num_local_experts": "num_experts"})
    if source.integer("num_experts", 16) != 1:
        raise ConfigError(f"{source.family}: num_experts is not supported: {DENSE_ALONE}")
    source.ignore(*HARMLESS)
    source.choice("hidden_act", "silu")
    source.choice("mamba_conv_bias", True)
    source.choice("mamba_proj_bias", False)
    source.choice("mamba_inner_layernorms", True)
    source.choice("sliding_window", None)
    vocab_size, width = source.integer("vocab_size", 65536), source.integer("hidden_size", 4096)
    num_layers = source.num_layers("num_hidden_layers", 32)
    heads = source.integer("num_attention_heads", 32)
    if heads > width:
        raise ConfigError(f"{source.family}: num_attention_heads must be at most {width}")
    return JambaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=source.integer("intermediate_size", 14336),
        attention_layers=_attention_layers(source, num_layers),
        num_attention_heads=heads,
        num_key_value_heads=source.integer("num_key_value_heads", 8),
        head_dim=source.integer("head_dim", width // heads),
        inner_size=source.integer("mamba_expand", 2) * width,
        state_size=source.integer("mamba_d_state", 16),
        conv_size=source.integer("mamba_d_conv", 4),
        dt_rank=rank(source, "mamba_dt_rank", width),
        norm_eps=source.number("rms_norm_eps", 1e-6),
        tied=source.boolean("tie_word_embeddings", False),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
        max_context=source.integer("max_position_embeddings", 262144),
    )


def _attention_layers(source: ForeignConfig, num_layers: int) -> tuple[int, ...]:
    """By the period and the offset; a list of kinds, if there is one, must say the same."""
    period, offset = source.integer("attn_layer_period", 8), source.anything("attn_layer_offset")
    offset = 4 if offset is None else offset
    if type(offset) is not int or not 0 <= offset < period:
        raise ConfigError(
            f"{source.family}: attn_layer_offset must be in 0..{period - 1}, not {offset!r:.80}"
        )
    usual = ["attention" if i % period == offset else "mamba" for i in range(num_layers)]
    listed = next((name for name in PATTERNS if name in source), None)
    if listed and kinds_of_layers(source, "mamba", "attention") != usual:
        raise ConfigError(
            f"{source.family}: {listed} says other kinds of layers than attn_layer_period"
        )
    return tuple(range(offset, num_layers, period))


#: The norms inside a mixer, in GGUF.
_GGUF_NORMS = {f"{part}_norm.weight": weight(f"ssm_{part}_norm") for part in ("dt", "b", "c")}
_SHARED = gguf_names()
GGUF = HybridNames(
    ends=_SHARED.ends,
    block=_SHARED.block,
    both=_SHARED.both,
    attention=_SHARED.attention,
    other={**_SHARED.other, **_GGUF_NORMS},
)


def read_gguf(file: GgufFile, name: str) -> tuple[JambaConfig, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    source = GgufSource(file, name, "jamba")
    config = _gguf_config(source, file)
    source.refuse_unknown()
    weights = Renamed(file, GGUF.parts_of(config))
    weights.check(name, config.weight_shapes(), set())
    return config, weights


def _gguf_config(source: GgufSource, file: GgufFile) -> JambaConfig:
    """Layers without heads of keys and values are Mamba-1; a dense model has one expert."""
    if source.anything("expert_count") not in (None, 0, 1):
        raise ConfigError(f"{source.family}: expert_count is not supported: {DENSE_ALONE}")
    source.ignore("expert_used_count")
    return JambaConfig(
        **source.decoder(file),
        intermediate_size=source.integer("feed_forward_length"),
        inner_size=source.integer("ssm.inner_size"),
        state_size=source.integer("ssm.state_size"),
        conv_size=source.integer("ssm.conv_kernel"),
        dt_rank=source.integer("ssm.time_step_rank"),
        norm_eps=source.number("attention.layer_norm_rms_epsilon", 1e-6),
    )
