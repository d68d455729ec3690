"""Jamba, dense, in its Hugging Face layout and in GGUF, as llama.cpp's converter writes it."""

from __future__ import annotations

from model.families.jamba.config import JambaConfig
from model.families.mamba.read import FOLDER_MIXER, rank
from model.families.mamba.read import GGUF as MAMBA_GGUF
from model.files import ConfigError
from model.foreign.config import ForeignConfig, read_decoder
from model.foreign.gguf import GgufSource
from model.foreign.hybrid_names import FEED_FORWARD_FOLDER, inside, weights_of
from model.foreign.layer_kinds import PATTERNS, mamba_kinds
from model.foreign.weights import Part, Renamed, Weights
from model.weights.gguf_file import GgufFile

#: What kernels use, which logits are computed, and what is said of experts where there are none.
HARMLESS = (
    *("use_mamba_kernels", "use_mambapy", "use_associative_scan", "n_ctx"),
    *("num_logits_to_keep", "calc_logits_for_entire_prompt"),
    *("num_experts_per_tok", "expert_layer_period", "expert_layer_offset"),
)
#: Those inside a mixer.
_FOLDER_NORMS = weights_of({f"{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")})
FOLDER = FEED_FORWARD_FOLDER.but(
    other=inside("mamba", FOLDER_MIXER | _FOLDER_NORMS),
)
GGUF = MAMBA_GGUF.but(
    other=weights_of({f"{part}_norm": f"ssm_{part}_norm" for part in ("dt", "b", "c")})
)


def read_jamba(source: ForeignConfig, weights: Weights) -> tuple[JambaConfig, Renamed]:
    """A folder of ``jamba`` without experts."""
    config = _config(source)
    return config, FOLDER.read(weights.take_all(), config)


def key_layouts(config: JambaConfig) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [FOLDER.parts_of(config)]


def _config(source: ForeignConfig) -> JambaConfig:
    source.rename({"num_local_experts": "num_experts"})
    source.refuse_experts("num_experts", source.integer("num_experts", 16) != 1)
    source.ignore(*HARMLESS)
    source.only(hidden_act="silu", sliding_window=None)
    source.only(mamba_conv_bias=True, mamba_proj_bias=False, mamba_inner_layernorms=True)
    width, heads = source.integer("hidden_size", 4096), source.integer("num_attention_heads", 32)
    if heads > width:
        raise ConfigError(f"{source.family}: num_attention_heads must be at most {width}")
    usual = {"vocab_size": 65536, "hidden_size": width, "num_hidden_layers": 32}
    usual |= {"num_attention_heads": heads, "num_key_value_heads": 8}
    usual |= {"intermediate_size": 14336, "max_position_embeddings": 262144}
    sizes = read_decoder(source, ("rms_norm_eps", 1e-6), usual)
    return JambaConfig(
        **sizes,
        attention_layers=_attention_layers(source, sizes["num_hidden_layers"]),
        inner_size=source.integer("mamba_expand", 2) * width,
        state_size=source.integer("mamba_d_state", 16),
        conv_size=source.integer("mamba_d_conv", 4),
        dt_rank=rank(source, "mamba_dt_rank", width),
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
    if listed and mamba_kinds(source, "mamba", "attention") != usual:
        raise ConfigError(
            f"{source.family}: {listed} says other kinds of layers than attn_layer_period"
        )
    return tuple(range(offset, num_layers, period))


def read_gguf(file: GgufFile, name: str) -> tuple[JambaConfig, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    source = GgufSource(file, name, "jamba")
    config = _gguf_config(source, file)
    source.refuse_unknown()
    return config, GGUF.read(file, config, name=name)


def _gguf_config(source: GgufSource, file: GgufFile) -> JambaConfig:
    """Layers without heads of keys and values are Mamba-1; a dense model has one expert."""
    source.refuse_experts("expert_count", source.anything("expert_count") not in (None, 0, 1))
    source.ignore("expert_used_count")
    return JambaConfig(
        **source.decoder(file, theta=None, eps=1e-6),
        intermediate_size=source.integer("feed_forward_length"),
        inner_size=source.integer("ssm.inner_size"),
        state_size=source.integer("ssm.state_size"),
        conv_size=source.integer("ssm.conv_kernel"),
        dt_rank=source.integer("ssm.time_step_rank"),
    )
