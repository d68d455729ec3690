"""Mamba in folders of transformers, of state-spaces and of Mistral, and in GGUF, and their keys.

In GGUF, as llama.cpp's converter writes it, A is stored in the place of its logarithm; files made
before the converter was merged have A and D of a Mamba-2 as vectors, not columns. The head may be a
copy of the embedding. Falcon-Mamba's norms inside the mixer have the epsilon of the other norms, as
in llama.cpp: the file has no other.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

from model.families.mamba.config import Mamba2Config, MambaConfig
from model.files import ConfigError
from model.foreign import hybrid_names
from model.foreign.config import ForeignConfig
from model.foreign.gguf import BOS, EOS, GgufSource
from model.foreign.hybrid_names import HybridNames, inside, weight, weights_of, with_bias
from model.foreign.weights import Part, Renamed, Weights, are_equal
from model.weights import Array, CheckpointError, file_name
from model.weights.gguf_file import GgufFile

# -------------------------------------------------------------------------------------------------
# The keys of Mamba files, and which of our weights each is.


#: Of a mixer in folders, in a layer's module for it. Each of Mamba-1 and Mamba-2 has some.
FOLDER_MIXER = {
    **weights_of({"in": "in_proj", "x": "x_proj", "norm": "norm", "out": "out_proj"}),
    **with_bias({"dt": "dt_proj"}),
    "conv": weight("conv1d", "squeezed"),
    "conv_bias": Part(("conv1d.bias",)),
    **{name: Part((name,)) for name in ("dt_bias", "A_log", "D")},
}


def folder_names(keys: Container[str]) -> HybridNames:
    """Those of folders with these ``keys``.

    The embedding has one name in transformers and another in state-spaces' own files; Codestral's
    own file has a prefix.
    """
    prefix = "model." if "model.backbone.norm_f.weight" in keys else ""
    has_own_name = f"{prefix}backbone.embedding.weight" in keys
    embedding = "embedding" if has_own_name else "embeddings"
    return HybridNames(
        ends={
            "embedding.weight": weight(f"{prefix}backbone.{embedding}"),
            "norm.weight": weight(f"{prefix}backbone.norm_f"),
            "head.weight": weight(f"{prefix}lm_head"),
        },
        block=f"{prefix}backbone.layers.{{}}",
        both={"mixer_norm.weight": weight("norm")},
        other=inside("mixer", FOLDER_MIXER),
    )


def key_layouts(config: MambaConfig | Mamba2Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    kinds = ((), ("backbone.embedding.weight",))
    return [folder_names(keys).parts_of(config) for keys in kinds]


#: Of GGUF, which has A in the place of its logarithm, and vectors of Mamba-2 as columns.
GGUF = hybrid_names.GGUF.but(
    other={
        **weights_of({"in": "ssm_in", "x": "ssm_x", "out": "ssm_out"}),
        **with_bias({"dt": "ssm_dt"}),
        "conv": weight("ssm_conv1d"),
        "conv_bias": Part(("ssm_conv1d.bias",)),
        "dt_bias": Part(("ssm_dt.bias",)),
        "A_log": Part(("ssm_a",), "log_negative"),
        "D": Part(("ssm_d",), "column"),
        "norm.weight": weight("ssm_norm", "flattened"),
    }
)


def is_embedding(files: Mapping[str, Array], names: HybridNames) -> bool:
    """Whether the head, which ``files`` have, has the numbers of the embedding."""
    (head,), (embedding,) = (names.ends[f"{key}.weight"].keys for key in ("head", "embedding"))
    return embedding in files and are_equal(files, head, embedding)


def unused_keys(files: Mapping[str, Array], names: HybridNames, tied: bool, name: str) -> set[str]:
    """The key of the head that a tied model's files may hold, as some hold the embedding twice.

    Raises `CheckpointError` where it is not the embedding.
    """
    (head,) = names.ends["head.weight"].keys
    if not tied or head not in files:
        return set()
    if not is_embedding(files, names):
        raise CheckpointError(f"{name}: {head} is not the embedding, though they are tied")
    return {head}


# -------------------------------------------------------------------------------------------------
# Mamba in folders of transformers (mamba, falcon_mamba, mamba2), of state-spaces and of Mistral.
#
# Those of state-spaces have no ``model_type``, sizes by other names, and often no tokenizer: that
# is GPT-NeoX-20B's. Their vocabulary is padded to a multiple. Mistral's of Codestral are the same
# network with a config that says less. Tensors are read when they are asked for.
#
# What no published model has, and is refused: biases of the projections, convolutions without a
# bias, norms other than RMSNorm, a bounded Delta, an MLP, and layers of attention.


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
        dt_rank=rank(source, "time_step_rank", width),
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
    refuse_limit(source, "time_step_limit")
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
        dt_rank=rank(mixer, "dt_rank", both["hidden_size"]),
    )


def _mamba2(mixer: ForeignConfig, inner: int, both: dict[str, Any]) -> Mamba2Config:
    mixer.choice("rmsnorm", True)
    mixer.choice("norm_before_gate", False)
    mixer.choice("D_has_hdim", False)
    mixer.choice("d_ssm", None, inner)
    refuse_limit(mixer, "dt_limit")
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


def rank(source: ForeignConfig, name: str, width: int) -> int:
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


def refuse_limit(source: ForeignConfig, name: str) -> None:
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


#: What llama.cpp wants of every file, and these models do not have.
GGUF_HARMLESS = ("context_length", "feed_forward_length", "attention.head_count")
HEAD = "output.weight"


def read_gguf(file: GgufFile, name: str) -> tuple[MambaConfig | Mamba2Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    family = str(file.metadata["general.architecture"])
    source = GgufSource(file, name, family)
    source.ignore(*GGUF_HARMLESS)
    num_layers, size, width = source.sizes(file)
    both: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "state_size": source.integer("ssm.state_size"),
        "conv_size": source.integer("ssm.conv_kernel"),
        "norm_eps": source.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tied": HEAD not in file or is_embedding(file, GGUF),
        "bos_token_id": source.special_id(BOS, size),
        "eos_token_id": source.special_id(EOS, size),
    }
    config = (_gguf_mamba2 if family == "mamba2" else _gguf_mamba)(source, both)
    source.refuse_unknown()
    weights = Renamed(file, GGUF.parts_of(config))
    unused = {HEAD} if config.tied else set()
    weights.check(name, config.weight_shapes(), unused & set(file))
    return config, weights


def _gguf_mamba(source: GgufSource, both: dict[str, Any]) -> MambaConfig:
    is_normed = source.boolean("ssm.dt_b_c_rms", False)
    return MambaConfig(
        **both,
        inner_size=source.integer("ssm.inner_size"),
        dt_rank=source.integer("ssm.time_step_rank"),
        mixer_norm=is_normed,
        mixer_norm_eps=both["norm_eps"] if is_normed else 1e-6,
    )


def _gguf_mamba2(source: GgufSource, both: dict[str, Any]) -> Mamba2Config:
    inner, heads = source.integer("ssm.inner_size"), source.integer("ssm.time_step_rank")
    if inner % heads:
        raise ConfigError(
            f"{source.family}: ssm.time_step_rank must divide ssm.inner_size {inner}, not {heads}"
        )
    return Mamba2Config(
        **both,
        num_attention_heads=heads,
        head_dim=inner // heads,
        num_groups=source.integer("ssm.group_count", 1),
    )
