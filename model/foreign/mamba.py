"""Mamba in folders of transformers (mamba, falcon_mamba, mamba2), of state-spaces and of Mistral.

Those of state-spaces have no ``model_type``, sizes by other names, and often no tokenizer: that is
GPT-NeoX-20B's. Their vocabulary is padded to a multiple. Mistral's of Codestral are the same
network with a config that says less. Tensors are read when they are asked for.

What no published model has, and is refused: biases of the projections, convolutions without a bias,
norms other than RMSNorm, a bounded Delta, an MLP, and layers of attention.
"""

from __future__ import annotations

import math
from typing import Any

from model.architectures.mamba.config import MambaConfig
from model.architectures.mamba2.config import Mamba2Config
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.mamba_names import folder_names, unused_keys
from model.foreign.renamed import Renamed
from model.foreign.weights import Weights
from model.weights import file_name

#: What training starts from, what kernels use, and second names of fields.
HARMLESS = (
    *("residual_in_fp32", "rescale_prenorm_residual", "chunk_size", "fused_add_norm"),
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme"),
    *("time_step_scale", "use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
    *("d_inner", "d_model", "n_layer", "pad_vocab_size_multiple", "tokenizer_class"),
)
#: The same in ``ssm_cfg``.
HARMLESS_SSM = (
    *("dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range"),
    *("chunk_size", "use_mem_eff_path", "use_fast_path", "conv_init"),
)
#: Epsilon of every norm of state-spaces' models.
NORM_EPS = 1e-5


def read_mamba(source: ForeignConfig, weights: Weights) -> tuple[MambaConfig, Renamed]:
    """A folder of ``mamba`` or ``falcon_mamba``."""
    _refuse_others(source)
    if source.anything("ssm_cfg"):
        raise ConfigError(f"{source.family}: ssm_cfg is not supported next to a model_type")
    vocab_size, width = source.integer("vocab_size", 50280), source.integer("hidden_size", 768)
    inner = source.integer("expand", 2) * width
    is_falcon = source.family == "falcon_mamba"
    config = MambaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=source.num_layers("num_hidden_layers", 32),
        inner_size=source.integer("intermediate_size", inner),
        state_size=source.integer("state_size", 16),
        conv_size=source.integer("conv_kernel", 4),
        dt_rank=_rank(source, "time_step_rank", width),
        norm_eps=source.number("layer_norm_epsilon", NORM_EPS),
        mixer_norm=is_falcon,
        mixer_norm_eps=source.number("mixer_rms_eps", 1e-6) if is_falcon else 1e-6,
        tied=source.boolean("tie_word_embeddings", True),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
    )
    return config, _renamed(config, weights)


def read_mamba2(source: ForeignConfig, weights: Weights) -> tuple[Mamba2Config, Renamed]:
    """A folder of ``mamba2``; defaults are those of `transformers`, which describe Codestral."""
    source.ignore("time_step_rank")
    _refuse_others(source)
    _refuse_limit(source, "time_step_limit")
    source.choice("norm_before_gate", False)
    vocab_size, width = source.integer("vocab_size", 32768), source.integer("hidden_size", 4096)
    heads, head_dim = source.integer("num_heads", 128), source.integer("head_dim", 64)
    inner = source.integer("expand", 2) * width
    if heads * head_dim != inner or source.integer("intermediate_size", inner) != inner:
        raise ConfigError(
            f"{source.family}: num_heads * head_dim is {heads * head_dim}, not expand *"
            f" hidden_size = {inner}"
        )
    config = Mamba2Config(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=source.num_layers("num_hidden_layers", 64),
        num_attention_heads=heads,
        head_dim=head_dim,
        state_size=source.integer("state_size", 128),
        num_groups=source.integer("n_groups", 8),
        conv_size=source.integer("conv_kernel", 4),
        norm_eps=source.number("layer_norm_epsilon", NORM_EPS),
        tied=source.boolean("tie_word_embeddings", False),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
    )
    return config, _renamed(config, weights)


def read_state_spaces(
    source: ForeignConfig, weights: Weights
) -> tuple[MambaConfig | Mamba2Config, Renamed]:
    """A folder of state-spaces: Mamba-1 or Mamba-2, as its ``ssm_cfg`` says."""
    source.ignore("residual_in_fp32", "fused_add_norm")
    source.choice("rms_norm", True)
    source.choice("d_intermediate", 0, None)
    if source.anything("attn_cfg"):
        raise ConfigError("attn_cfg is not supported: layers of attention are not")
    source.ignore("attn_layer_idx")  # an empty list, else it is refused before
    cfg = source.anything("ssm_cfg")
    cfg = {} if cfg is None else cfg
    if not isinstance(cfg, dict):
        raise ConfigError(f"ssm_cfg must be an object, not {cfg!r:.80}")
    mixer = ForeignConfig({"model_type": "ssm_cfg", **cfg})
    mixer.ignore(*HARMLESS_SSM)
    layer = mixer.choice("layer", "Mamba1", "Mamba2")
    mixer.choice("bias", False)
    mixer.choice("conv_bias", True)
    multiple = source.integer("pad_vocab_size_multiple", 8)
    vocab_size = -(-source.integer("vocab_size", 50277) // multiple) * multiple
    width = source.integer("d_model")
    inner = mixer.integer("expand", 2) * width
    both: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": source.num_layers("n_layer"),
        "conv_size": mixer.integer("d_conv", 4),
        "norm_eps": NORM_EPS,
        "tied": source.boolean("tie_embeddings", True),
        "bos_token_id": source.special_id("bos_token_id", vocab_size),
        "eos_token_id": source.special_id("eos_token_id", vocab_size),
    }
    config = _mamba2(mixer, inner, both) if layer == "Mamba2" else _mamba(mixer, inner, both)
    mixer.refuse_unknown()
    return config, _renamed(config, weights)


def read_mistral(source: ForeignConfig, weights: Weights) -> tuple[Mamba2Config, Renamed]:
    """Codestral Mamba by its ``params.json``: mistral_inference's ``MambaArgs``.

    That passes the groups to state-spaces' package, which has its own default for the rest.
    """
    source.ignore("residual_in_fp32", "fused_add_norm")
    source.choice("rms_norm", True)
    multiple = source.integer("pad_vocab_size_multiple", 1)
    vocab_size = -(-source.integer("vocab_size") // multiple) * multiple
    width = source.integer("dim")
    both: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": source.num_layers("n_layers"),
        "norm_eps": NORM_EPS,
        "tied": source.boolean("tie_embeddings", False),
        "bos_token_id": source.special_id("bos_token_id", vocab_size),
        "eos_token_id": source.special_id("eos_token_id", vocab_size),
    }
    groups = ForeignConfig({"model_type": "params.json", "ngroups": source.integer("n_groups", 1)})
    config = _mamba2(groups, 2 * width, both)
    return config, _renamed(config, weights)


def _mamba(mixer: ForeignConfig, inner: int, both: dict[str, Any]) -> MambaConfig:
    return MambaConfig(
        **both,
        inner_size=inner,
        state_size=mixer.integer("d_state", 16),
        dt_rank=_rank(mixer, "dt_rank", both["hidden_size"]),
    )


def _mamba2(mixer: ForeignConfig, inner: int, both: dict[str, Any]) -> Mamba2Config:
    mixer.choice("rmsnorm", True)
    mixer.choice("norm_before_gate", False)
    mixer.choice("D_has_hdim", False)
    mixer.choice("d_ssm", None, inner)
    _refuse_limit(mixer, "dt_limit")
    head_dim = mixer.integer("headdim", 64)
    if inner % head_dim:
        raise ConfigError(f"{mixer.family}: headdim must divide {inner}, not {head_dim}")
    return Mamba2Config(
        **both,
        num_attention_heads=inner // head_dim,
        head_dim=head_dim,
        state_size=mixer.integer("d_state", 128),
        num_groups=mixer.integer("ngroups", 1),
    )


def _rank(source: ForeignConfig, name: str, width: int) -> int:
    """A sixteenth of the width, where the file does not say it or says "auto"."""
    value = source.anything(name)
    value = math.ceil(width / 16) if value in (None, "auto") else value
    if type(value) is not int or value < 1:
        raise ConfigError(f"{source.family}: {name} must be a positive integer, not {value!r:.80}")
    return value


def _refuse_others(source: ForeignConfig) -> None:
    """Raises `ConfigError` for what these networks do not do."""
    source.ignore(*HARMLESS)
    source.choice("use_bias", False)
    source.choice("use_conv_bias", True)
    source.choice("hidden_act", "silu", "swish")
    source.choice("rms_norm", True)


def _refuse_limit(source: ForeignConfig, name: str) -> None:
    """Raises `ConfigError` where Delta has a bound, which is applied in some forms only."""
    limit = source.anything(name)
    if limit is None:
        return
    low, high = limit if isinstance(limit, list) and len(limit) == 2 else (None, None)
    high = high.get("__float__") if isinstance(high, dict) else high
    is_infinite = high == math.inf or str(high) in ("Infinity", "inf")
    if type(low) not in (int, float) or low != 0 or not is_infinite:
        raise ConfigError(
            f"{source.family}: {name} {limit!r:.80} is not supported, only 0 to infinity"
        )


def _renamed(config: MambaConfig | Mamba2Config, weights: Weights) -> Renamed:
    files = weights.take_all()
    name, names = file_name(files), folder_names(files)
    ours = Renamed(files, names.parts_of(config))
    ours.check(name, config.weight_shapes(), unused_keys(files, names, config.tied, name))
    return ours
