"""Qwen3.5 and Qwen3.6 in their Hugging Face layouts, dense, and their keys."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from model.families.qwen35.config import MTP_INPUTS, Qwen35Config, Qwen35MtpConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig, read_rotary
from model.foreign.hybrid_names import HybridNames, attention_layers, refuse_other_head, weight
from model.foreign.weights import Part, Renamed, Weights
from model.weights import Array, CheckpointError, file_name, shape_in

logger = logging.getLogger("everstream.models")

# -------------------------------------------------------------------------------------------------
# The keys of Qwen3.5 files, and which of our weights each is.


def folder_names(prefix: str) -> HybridNames:
    """Those of Hugging Face folders, whose text model's keys begin with ``prefix``.

    All norms but that of the gated delta net are stored less one.
    """
    return HybridNames(
        ends={
            "embedding.weight": weight(f"{prefix}embed_tokens"),
            "norm.weight": weight(f"{prefix}norm", "plus_one"),
            "head.weight": weight("lm_head"),
        },
        block=f"{prefix}layers.{{}}",
        both={
            "mixer_norm.weight": weight("input_layernorm", "plus_one"),
            "mlp_norm.weight": weight("post_attention_layernorm", "plus_one"),
            **{f"mlp.{name}.weight": weight(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
        },
        attention={
            **{f"{name}.weight": weight(f"self_attn.{name}_proj") for name in "qkv"},
            "out.weight": weight("self_attn.o_proj"),
            "q_norm.weight": weight("self_attn.q_norm", "plus_one"),
            "k_norm.weight": weight("self_attn.k_norm", "plus_one"),
        },
        other={
            **{
                f"{name}.weight": weight(f"linear_attn.in_proj_{name}")
                for name in ("qkv", "z", "b", "a")
            },
            "conv": weight("linear_attn.conv1d", "squeezed"),
            "A_log": Part(("linear_attn.A_log",)),
            "dt_bias": Part(("linear_attn.dt_bias",)),
            "norm.weight": weight("linear_attn.norm"),
            "out.weight": weight("linear_attn.out_proj"),
        },
    )


#: Of GGUF, where all norms are what the model multiplies with.
GGUF = HybridNames(
    ends={
        "embedding.weight": weight("token_embd"),
        "norm.weight": weight("output_norm"),
        "head.weight": weight("output"),
    },
    block="blk.{}",
    both={
        "mixer_norm.weight": weight("attn_norm"),
        "mlp_norm.weight": weight("post_attention_norm"),
        **{f"mlp.{name}.weight": weight(f"ffn_{name}") for name in ("gate", "up", "down")},
    },
    attention={
        **{f"{name}.weight": weight(f"attn_{name}") for name in "qkv"},
        "out.weight": weight("attn_output"),
        "q_norm.weight": weight("attn_q_norm"),
        "k_norm.weight": weight("attn_k_norm"),
    },
    other={
        "qkv.weight": weight("attn_qkv"),
        "z.weight": weight("attn_gate"),
        "b.weight": weight("ssm_beta"),
        "a.weight": weight("ssm_alpha"),
        "conv": weight("ssm_conv1d"),
        "A_log": Part(("ssm_a",), "log_negative"),
        "dt_bias": Part(("ssm_dt.bias",)),
        "norm.weight": weight("ssm_norm"),
        "out.weight": weight("ssm_out"),
    },
)


# -------------------------------------------------------------------------------------------------
# Published folders are multimodal (``qwen3_5``): their text model's config is ``text_config``, and
# its keys have a prefix of their own. What sees images is left out; what predicts several tokens
# (``mtp``) is a model of its own.


#: Of the multimodal config: what concerns images, and hints for other servers.
HARMLESS = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    *("vision_end_token_id", "language_model_only", "bos_token_id", "eos_token_id"),
)
#: Of the text's: training, prediction of several tokens, and the state's dtype of other kernels.
TEXT_HARMLESS = (
    *("attention_dropout", "mamba_ssm_dtype", "mtp_num_hidden_layers"),
    *("mtp_use_dedicated_embeddings", "router_aux_loss_coef", "output_router_logits"),
)
#: What divides positions among axes of an image; those of text are the same on each.
AXES = frozenset({"mrope_section", "mrope_interleaved"})

KINDS = ("linear_attention", "full_attention")
#: Keys of the text model in multimodal folders, and in those of text alone.
PREFIXES = ("model.language_model.", "model.")
UNUSED = re.compile(r"(model\.visual\.|visual\.|mtp\.).*")


def read_qwen35(source: ForeignConfig, weights: Weights) -> tuple[Qwen35Config, Renamed]:
    """See the module's docstring."""
    files = weights.take_all()
    file = file_name(files)
    config = _config(_text_config(source))
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in files), PREFIXES[1])
    names = folder_names(prefix)
    parts = names.parts_of(config)
    _refuse_converted(files, parts, config, file)
    unused = {key for key in files if UNUSED.fullmatch(key)}
    ours = Renamed(files, parts)
    ours.check(file, config.weight_shapes(), unused | refuse_other_head(files, config, names, file))
    return config, ours


# -------------------------------------------------------------------------------------------------
# The multi-token head, whose block is as the others. It only drafts, so a file's is left out where
# it is not whole or of another form.


#: What it begins with, in folders.
MTP = "mtp."
OTHER_MTP = "the multi-token head is left out: only one of one layer drafts"


def mtp_names() -> HybridNames:
    """The parts of a folder's multi-token head."""
    norms = {f"{name}_norm.weight": f"{MTP}pre_fc_norm_{name}" for name in MTP_INPUTS}
    ends = {"join.weight": weight(f"{MTP}fc"), "norm.weight": weight(f"{MTP}norm", "plus_one")}
    ends |= {name: weight(key, "plus_one") for name, key in norms.items()}
    return replace(folder_names(MTP), ends=ends)


def read_mtp(
    values: Mapping[str, Any], files: Mapping[str, Array], config: Qwen35Config
) -> tuple[Qwen35MtpConfig, Renamed] | None:
    """The multi-token head in a folder's tensors; None where there is none that drafts here."""
    if not any(key.startswith(MTP) for key in files):
        return None
    text = values.get("text_config") or values
    num_layers, has_embedding = (
        text.get(f"mtp_{name}") for name in ("num_hidden_layers", "use_dedicated_embeddings")
    )
    if num_layers not in (None, 1) or has_embedding:
        logger.info(OTHER_MTP)
        return None
    return whole_mtp(files, mtp_names(), MTP, config)


def whole_mtp(
    files: Mapping[str, Array], names: HybridNames, prefix: str, config: Qwen35Config
) -> tuple[Qwen35MtpConfig, Renamed] | None:
    """A head whose keys all begin with ``prefix``; None, and a log line, where it is not whole."""
    head = Qwen35MtpConfig.of(config)
    weights = Renamed(files, names.parts_of(head))
    try:
        others = {key for key in files if not key.startswith(prefix)}
        weights.check(file_name(files), head.weight_shapes(), others)
    except CheckpointError as error:
        logger.info("the multi-token head is left out: %s", error)
        return None
    return head, weights


def key_layouts(config: Qwen35Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [folder_names(prefix).parts_of(config) for prefix in PREFIXES]


def _refuse_converted(
    files: Mapping[str, Array], parts: Mapping[str, Part], config: Qwen35Config, name: str
) -> None:
    """Raises `CheckpointError` for files of MLX, whose norms are stored as they are."""
    keys = [part.keys[0] for ours, part in parts.items() if ours.endswith(".conv")]
    for key in keys:
        shape = shape_in(files, key) if key in files else ()
        if len(shape) == 3 and shape[2] == 1 < config.conv_size:
            raise CheckpointError(
                f"{name}: {key} is {list(shape)}, as files converted for MLX have it, which are"
                " not supported: use the original"
            )


def _text_config(source: ForeignConfig) -> ForeignConfig:
    """The fields of the text model, with the ends of text that the whole config has."""
    if source.family != "qwen3_5":
        return source
    values: Any = source.anything("text_config")
    if not isinstance(values, dict):
        raise ConfigError(f"{source.family}: text_config must be an object, not {values!r:.80}")
    kind = values.get("model_type", "qwen3_5_text")
    if kind != "qwen3_5_text":
        raise ConfigError(
            f"{source.family}: text_config.model_type {kind!r:.80} is not supported,"
            " only 'qwen3_5_text'"
        )
    values = {name: value for name, value in values.items() if value is not None}
    values = {"tie_word_embeddings": False, **values, "model_type": "qwen3_5_text"}
    tied = source.boolean("tie_word_embeddings", values["tie_word_embeddings"])
    if tied != values["tie_word_embeddings"]:
        raise ConfigError(f"{source.family}: tie_word_embeddings is {tied}, text_config's is not")
    for name in ("bos_token_id", "eos_token_id"):
        if values.get(name) is None:
            values[name] = source.anything(name)
    source.ignore(*HARMLESS)
    source.refuse_unknown()
    return ForeignConfig(values, source.files)


def _config(source: ForeignConfig) -> Qwen35Config:
    source.ignore(*TEXT_HARMLESS)
    source.choice("hidden_act", "silu")
    source.choice("attention_bias", False)
    source.choice("attn_output_gate", True)
    source.choice("output_gate_type", "swish", "silu")
    source.choice("mlp_only_layers", [])
    head_dim, rotary = source.integer("head_dim", 256), read_rotary(source, 1e7, 0.25, AXES)
    num_layers, vocab_size = source.num_layers("num_hidden_layers"), source.integer("vocab_size")
    config = Qwen35Config(
        vocab_size=vocab_size,
        hidden_size=source.integer("hidden_size"),
        num_hidden_layers=num_layers,
        intermediate_size=source.integer("intermediate_size"),
        attention_layers=attention_layers(
            source, num_layers, KINDS, source.integer("full_attention_interval", 4)
        ),
        num_attention_heads=source.integer("num_attention_heads"),
        num_key_value_heads=source.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * rotary.part),
        rope_theta=rotary.theta,
        num_key_heads=source.integer("linear_num_key_heads", 16),
        num_value_heads=source.integer("linear_num_value_heads", 32),
        key_head_dim=source.integer("linear_key_head_dim", 128),
        value_head_dim=source.integer("linear_value_head_dim", 128),
        conv_size=source.integer("linear_conv_kernel_dim", 4),
        norm_eps=source.number("rms_norm_eps", 1e-6),
        tied=source.boolean("tie_word_embeddings", False),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
        max_context=source.integer("max_position_embeddings", 32_768),
    )
    source.refuse_unknown()
    return config
