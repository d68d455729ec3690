"""Models with a bounded past as `transformers` builds them, with random weights, and as ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaForCausalLM,
    Lfm2ForCausalLM,
    Lfm3ForCausalLM,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers import (
    JambaConfig as TheirJambaConfig,
)
from transformers import (
    Lfm2Config as TheirLfm2Config,
)
from transformers import (
    Lfm3Config as TheirLfm3Config,
)
from transformers import (
    LlamaConfig as TheirLlamaConfig,
)

from model.architectures.decoder import Decoder
from model.architectures.hybrid import BoundedConfig
from model.architectures.network import model_of
from model.families.jamba import read as jamba_read
from model.families.jamba.config import JambaConfig
from model.families.lfm2 import read as lfm2_read
from model.families.lfm2.config import Lfm2Config
from model.families.lfm3 import read as lfm3_read
from model.families.lfm3.config import Lfm3Config
from model.families.llama import read as llama_read
from model.families.llama.config import LlamaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.mamba2_hybrid.read import (
    STACKED_MLP,
    falcon_names,
    granite_names,
    nemotron_names,
)
from model.families.qwen35.config import Qwen35Config
from model.families.qwen35.read import folder_names
from model.foreign.config import ForeignConfig, Rotary
from model.foreign.hybrid_names import HybridNames
from model.foreign.weights import Renamed

#: Of the models here: 600 positions.
CONTEXT = 608


@dataclass(frozen=True)
class Hybrid:
    """A model of theirs, and its config in ours."""

    config: BoundedConfig
    theirs: dict[str, Any]
    #: Their ``model_type``.
    family: str

    @property
    def names(self) -> HybridNames:
        if self.family == "qwen3_5_text":
            return folder_names("model.")
        if self.family == "lfm3":
            return lfm3_read.folder_names(lfm3_read.OWN_GATE)
        if self.family == "jamba":
            return jamba_read.FOLDER
        if self.family == "granitemoehybrid":
            return granite_names(self.theirs["logits_scaling"], STACKED_MLP)
        if self.family == "granite":
            return granite_names(self.theirs["logits_scaling"], {})
        if self.family == "nemotron_h":
            return nemotron_names("model")
        if isinstance(self.config, Mamba2HybridConfig):
            return falcon_names(ForeignConfig({"model_type": "", **FALCON}), self.config)
        return (lfm2_read if self.family == "lfm2" else llama_read).FOLDER

    def build(self) -> PreTrainedModel:
        """Their model, uninitialised."""
        config, model = FAMILIES[self.family]
        built: PreTrainedModel = model(config(**self.theirs))
        for module in built.modules():
            if hasattr(module, "time_step_limit"):
                # Of Nemotron they bound Delta from below, in a whole text and not in a step.
                module.time_step_limit = (0.0, float("inf"))
        return built


#: ``model_type`` -> their classes.
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "lfm2": (TheirLfm2Config, Lfm2ForCausalLM),
    "lfm3": (TheirLfm3Config, Lfm3ForCausalLM),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM),
    "jamba": (TheirJambaConfig, JambaForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "granitemoehybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM),
    "llama": (TheirLlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}


def qwen35(**changes: Any) -> Hybrid:
    """Sizes by our names."""
    values = {
        "vocab_size": 97,
        "hidden_size": 20,
        "num_hidden_layers": 4,
        "intermediate_size": 37,
        "attention_layers": (3,),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 4,
        "rope_theta": 1e4,
        "num_key_heads": 2,
        "num_value_heads": 2,
        "key_head_dim": 6,
        "value_head_dim": 10,
        "conv_size": 4,
        "tied": True,
        "context": CONTEXT,
        **changes,
    }
    config = Qwen35Config(**values)
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    rope["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    rope["mrope_section"] = [config.rotary_dim // 2, 0, 0]
    theirs = {
        **_shared(config),
        "layer_types": [
            "full_attention" if attention else "linear_attention"
            for attention in config.is_attention
        ],
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "linear_num_key_heads": config.num_key_heads,
        "linear_num_value_heads": config.num_value_heads,
        "linear_key_head_dim": config.key_head_dim,
        "linear_value_head_dim": config.value_head_dim,
        "linear_conv_kernel_dim": config.conv_size,
    }
    return Hybrid(config, theirs, "qwen3_5_text")


def lfm2(**changes: Any) -> Hybrid:
    """Sizes by our names."""
    values = {
        "vocab_size": 97,
        "hidden_size": 20,
        "num_hidden_layers": 4,
        "intermediate_size": 37,
        "attention_layers": (2,),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "rope_theta": 1e4,
        "conv_size": 3,
        "context": CONTEXT,
        **changes,
    }
    config = Lfm2Config(**values)
    theirs = {
        **_shared(config),
        "layer_types": [
            "full_attention" if attention else "conv" for attention in config.is_attention
        ],
        "norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "conv_L_cache": config.conv_size,
        "block_auto_adjust_ff_dim": False,
    }
    return Hybrid(config, theirs, "lfm2")


def lfm3(**changes: Any) -> Hybrid:
    """Sizes by our names."""
    values = {
        "vocab_size": 97,
        "hidden_size": 20,
        "num_hidden_layers": 4,
        "intermediate_size": 37,
        "attention_layers": (2,),
        "window_layers": (1,),
        "window": 21,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rope_theta": 1e4,
        "rotary_dim": 4,
        "window_rope_theta": 300.0,
        "window_rotary_dim": 10,
        "context": CONTEXT,
        **changes,
    }
    config = Lfm3Config(**values)
    kinds = dict.fromkeys(config.attention_layers, "full_attention")
    kinds |= dict.fromkeys(config.window_layers, "sliding_attention")
    theirs = {
        **_shared(config),
        "layer_types": [kinds.get(i, "conv") for i in range(config.num_hidden_layers)],
        "head_dim": config.head_dim,
        "sliding_window": config.window,
        "norm_eps": config.norm_eps,
        "rope_parameters": {
            "full_attention": _rope(config, config.rope_theta, config.rotary_dim),
            "sliding_attention": _rope(config, config.window_rope_theta, config.window_rotary_dim),
        },
        "conv_L_cache": config.conv_size,
        "use_attention_gate": config.head_gates,
        "use_sandwich_norm": config.post_norms,
        "pad_token_id": 0,
    }
    return Hybrid(config, theirs, "lfm3")


def _rope(config: Lfm3Config, theta: float, rotary_dim: int) -> dict[str, Any]:
    if rotary_dim == config.head_dim:
        return {"rope_type": "default", "rope_theta": theta}
    part = rotary_dim / config.head_dim
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part}


def granite(logits_scaling: float = 3.0, **changes: Any) -> Hybrid:
    """Granite 4.0-H. Sizes by our names."""
    values = {
        "vocab_size": 97,
        "hidden_size": 20,
        "num_hidden_layers": 4,
        "intermediate_size": 37,
        "attention_layers": (2,),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "num_mamba_heads": 8,
        "mamba_head_dim": 5,
        "state_size": 7,
        "num_groups": 2,
        "embedding_scale": 1.5,
        "residual_scale": 0.7,
        "attention_scale": 0.3,
        "norm_eps": 1e-6,
        "context": CONTEXT,
        **changes,
    }
    config = Mamba2HybridConfig(**values)
    theirs = {
        **_shared(config),
        "layer_types": [
            "full_attention" if attention else "linear_attention"
            for attention in config.is_attention
        ],
        "shared_intermediate_size": config.intermediate_size,
        "num_local_experts": 0,
        "position_embedding_type": "rope" if config.rotary_dim else "nope",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "mamba_n_heads": config.num_mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_expand": config.mamba.inner_size // config.hidden_size,
        "mamba_d_state": config.state_size,
        "mamba_n_groups": config.num_groups,
        "mamba_d_conv": config.conv_size,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.attention_scale,
        "logits_scaling": logits_scaling,
    }
    return Hybrid(config, theirs, "granitemoehybrid")


def granite3(logits_scaling: float = 3.0, **changes: Any) -> Hybrid:
    """Granite 3, whose layers are all attention. Sizes by our names."""
    values = {
        "vocab_size": 97,
        "hidden_size": 20,
        "num_hidden_layers": 3,
        "intermediate_size": 37,
        "attention_layers": (0, 1, 2),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "rotary_dim": 10,
        "embedding_scale": 1.5,
        "residual_scale": 0.7,
        "attention_scale": 0.3,
        "norm_eps": 1e-6,
        "context": CONTEXT,
        **changes,
    }
    config = Mamba2HybridConfig(**values)
    theirs = {
        **_shared(config),
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.attention_scale,
        "logits_scaling": logits_scaling,
    }
    return Hybrid(config, theirs, "granite")


def nemotron(**changes: Any) -> Hybrid:
    """Nemotron-H. Sizes by our names."""
    values = {
        "vocab_size": 97,
        "hidden_size": 20,
        "num_hidden_layers": 5,
        "intermediate_size": 37,
        "attention_layers": (2,),
        "mamba_layers": (0, 3),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "num_mamba_heads": 6,
        "mamba_head_dim": 7,
        "state_size": 9,
        "num_groups": 3,
        "tied": False,
        "context": CONTEXT,
        **changes,
    }
    config = Mamba2HybridConfig(**values)
    kinds = {(True, False): "full_attention", (False, True): "linear_attention"}
    pairs = zip(config.is_attention, config.is_mamba, strict=True)
    theirs = {
        **_shared(config),
        "layers_block_type": [kinds.get(pair, "mlp") for pair in pairs],
        "head_dim": config.head_dim,
        "layer_norm_epsilon": config.norm_eps,
        "mamba_num_heads": config.num_mamba_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "ssm_state_size": config.state_size,
        "n_groups": config.num_groups,
        "conv_kernel": config.conv_size,
    }
    del theirs["num_hidden_layers"]
    return Hybrid(config, theirs, "nemotron_h")


#: The multipliers of the Falcon-H1 here.
FALCON: dict[str, Any] = {
    "lm_head_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.2, 0.5, 1.1, 0.8],
    "mlp_multipliers": [0.7, 0.6],
}


def falcon(**changes: Any) -> Hybrid:
    """Falcon-H1. Sizes by our names."""
    values = {
        "vocab_size": 97,
        "hidden_size": 20,
        "num_hidden_layers": 3,
        "intermediate_size": 37,
        "attention_layers": (0, 1, 2),
        "mamba_layers": (0, 1, 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rotary_dim": 6,
        "num_mamba_heads": 4,
        "mamba_head_dim": 7,
        "state_size": 9,
        "num_groups": 2,
        "mixer_norm": False,
        "embedding_scale": 2.5,
        "tied": False,
        "context": CONTEXT,
        **changes,
    }
    config = Mamba2HybridConfig(**values)
    theirs = {
        **_shared(config),
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "mamba_d_ssm": config.mamba.inner_size,
        "mamba_n_heads": config.num_mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_d_state": config.state_size,
        "mamba_n_groups": config.num_groups,
        "mamba_d_conv": config.conv_size,
        "mamba_rms_norm": config.mixer_norm,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": config.embedding_scale,
        **FALCON,
    }
    return Hybrid(config, theirs, "falcon_h1")


def jamba(period: int = 4, **changes: Any) -> Hybrid:
    """Jamba, whose first layer of attention is followed by others a ``period`` away.

    Sizes by our names.
    """
    values = {
        "vocab_size": 97,
        "hidden_size": 20,
        "num_hidden_layers": 4,
        "intermediate_size": 37,
        "attention_layers": (2,),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "inner_size": 40,
        "state_size": 7,
        "dt_rank": 3,
        "tied": False,
        "context": CONTEXT,
        **changes,
    }
    config = JambaConfig(**values)
    theirs = {
        **_shared(config),
        "attn_layer_period": period,
        "attn_layer_offset": config.attention_layers[0],
        "num_experts": 1,
        "rms_norm_eps": config.norm_eps,
        "mamba_expand": config.inner_size // config.hidden_size,
        "mamba_d_state": config.state_size,
        "mamba_d_conv": config.conv_size,
        "mamba_dt_rank": config.dt_rank,
    }
    return Hybrid(config, theirs, "jamba")


def llama(family: str = "llama", scaling: Rotary | None = None, **changes: Any) -> Hybrid:
    """Llama, or what differs from it by little. Sizes by our names."""
    values = {
        "vocab_size": 97,
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "intermediate_size": 37,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rope_theta": 1e4,
        "context": CONTEXT,
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2",
        "unrotated_layers": (3,) if family == "smollm3" else (),
        **changes,
    }
    if scaling:
        values["rope_factors"] = scaling.factors(values["head_dim"])
    config = LlamaConfig(**values)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling:
        rope |= {"rope_type": scaling.scaling, **scaling.numbers}
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    theirs = {
        **_shared(config),
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
    }
    if config.qkv_bias and family != "qwen2":
        theirs["attention_bias"] = True
    if family == "smollm3":
        unrotated = config.unrotated_layers
        flags = [int(layer not in unrotated) for layer in range(config.num_hidden_layers)]
        theirs |= {"no_rope_layers": flags, "pad_token_id": 0}
    return Hybrid(config, theirs, family)


def _shared(config: BoundedConfig) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    names = (*names, "num_attention_heads", "num_key_value_heads")
    values = {name: getattr(config, name) for name in names}
    return {
        **values,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }


#: Published ratios of heads, tied or not, and sizes that no kernel is made for.
HYBRIDS = {
    "qwen35-equal": qwen35(),
    "qwen35-unequal": qwen35(num_value_heads=4, tied=False, norm_eps=1e-5),
    "qwen35-three": qwen35(num_value_heads=6, key_head_dim=8, value_head_dim=4, conv_size=3),
    "qwen35-wide": qwen35(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        attention_layers=(3, 7),
        head_dim=32,
        rotary_dim=8,
        rope_theta=1e7,
        num_key_heads=4,
        num_value_heads=8,
        key_head_dim=32,
        value_head_dim=32,
    ),
    "qwen35-triple": qwen35(
        vocab_size=330,
        hidden_size=32,
        intermediate_size=64,
        head_dim=64,
        rotary_dim=16,
        num_key_heads=2,
        num_value_heads=6,
        key_head_dim=16,
        value_head_dim=16,
        tied=False,
    ),
    "lfm2-odd": lfm2(),
    "lfm2-untied": lfm2(tied=False, conv_size=4, attention_layers=(0, 3), norm_eps=1e-6),
    "lfm2-wide": lfm2(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        attention_layers=(2, 5),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=1e6,
    ),
    "lfm3-odd": lfm3(),
    # A window of whole blocks, of two tokens, and no layer whose past grows.
    "lfm3-untied": lfm3(
        tied=False,
        conv_size=3,
        attention_layers=(0, 3),
        window=32,
        num_key_value_heads=6,
        rotary_dim=10,
        window_rotary_dim=2,
    ),
    "lfm3-narrow": lfm3(window=2, head_gates=False, post_norms=False, norm_eps=1e-6),
    "lfm3-windows": lfm3(attention_layers=(), window_layers=(0, 1, 3), context=0, window=70),
    "lfm3-wide": lfm3(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        attention_layers=(2, 6),
        window_layers=(4,),
        window=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=1e6,
        rotary_dim=16,
        window_rotary_dim=32,
        window_rope_theta=1e4,
    ),
    "granite-odd": granite(),
    "granite-rotary": granite(
        hidden_size=24,
        attention_layers=(0, 3),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rotary_dim=6,
        num_mamba_heads=6,
        mamba_head_dim=8,
        embedding_scale=12.0,
        residual_scale=0.22,
        tied=False,
        conv_size=3,
    ),
    "granite-wide": granite(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        attention_layers=(2, 5),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_mamba_heads=8,
        mamba_head_dim=16,
        state_size=32,
        num_groups=1,
        norm_eps=1e-5,
    ),
    "granite3-odd": granite3(),
    "granite3-wide": granite3(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=16,
        rope_theta=1e7,
        tied=False,
        norm_eps=1e-5,
    ),
    "nemotron-odd": nemotron(),
    "nemotron-wide": nemotron(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        attention_layers=(3,),
        mamba_layers=(0, 2, 5),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_mamba_heads=8,
        mamba_head_dim=16,
        state_size=32,
        num_groups=2,
    ),
    "falcon-odd": falcon(tied=True),
    "falcon-normed": falcon(mixer_norm=True, rope_theta=1e11, conv_size=3),
    "falcon-wide": falcon(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        rotary_dim=16,
        num_mamba_heads=6,
        mamba_head_dim=16,
        state_size=32,
        num_groups=1,
        rope_theta=1e11,
    ),
    "jamba-odd": jamba(),
    "jamba-tied": jamba(
        period=3,
        attention_layers=(0, 3),
        num_key_value_heads=2,
        inner_size=60,
        state_size=5,
        dt_rank=2,
        conv_size=3,
        norm_eps=1e-5,
        tied=True,
    ),
    "jamba-wide": jamba(
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        period=3,
        attention_layers=(2, 5),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        inner_size=128,
        state_size=16,
        dt_rank=32,
    ),
    "llama-odd": llama(
        scaling=Rotary(
            *(1e4, 1.0, "llama3"),
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64.0,
            },
        )
    ),
    "llama-wide": llama(
        vocab_size=330,
        hidden_size=96,
        intermediate_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        norm_eps=1e-6,
        tied=False,
    ),
    "llama-biased": llama(qkv_bias=True, out_bias=True, num_key_value_heads=6),
    "qwen2-wide": llama(
        "qwen2",
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        head_dim=16,
        rope_theta=1e6,
    ),
    "qwen3-wide": llama(
        "qwen3",
        vocab_size=330,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        rope_theta=1e6,
    ),
    "smollm3-odd": llama("smollm3", rope_theta=2e6),
}


@cache
def theirs(name: str) -> PreTrainedModel:
    """The model of transformers, every weight random, with magnitudes like a trained model's."""
    hybrid = HYBRIDS[name]
    model = hybrid.build()
    randomise(model, one_plus=hybrid.family == "qwen3_5_text")
    return model.eval().requires_grad_(False)


def randomise(model: torch.nn.Module, one_plus: bool, seed: int = 0) -> None:
    """Sets every weight; ``one_plus`` where most norms are stored less one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if "norm" in name or name.endswith("proj.bias"):
                parameter.mul_(0.2)
                if "norm" in name and (not one_plus or "linear_attn" in name):
                    parameter.add_(1.0)
            elif name.endswith("A_log"):
                parameter.mul_(0.7).sub_(2.0)
            elif "conv1d" in name or name.endswith("conv.conv.weight"):
                parameter.mul_(0.5)
            elif parameter.dim() == 2:
                is_ends = "embed" in name or "lm_head" in name
                parameter.mul_(0.15 if is_ends else 1.5 * parameter.shape[1] ** -0.5)


@cache
def ours(name: str) -> Decoder:
    """The same weights in our network."""
    hybrid = HYBRIDS[name]
    arrays = {key: tensor.numpy() for key, tensor in theirs(name).state_dict().items()}
    weights = Renamed(arrays, hybrid.names.parts_of(hybrid.config))
    network = model_of(hybrid.config, weights)
    assert isinstance(network, Decoder)
    return network


def texts(name: str, length: int, batch: int = 2) -> torch.Tensor:
    """Random ids [batch, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(HYBRIDS[name].config.vocab_size, (batch, length), generator=generator)
