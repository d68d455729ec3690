"""Small models with attention over a bounded past, for the native runtime."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from model.architectures.hybrid import BoundedConfig, with_past
from model.families.jamba.config import JambaConfig
from model.families.lfm2.config import Lfm2Config
from model.families.lfm3.config import Lfm3Config
from model.families.llama.config import LayerPlan, LlamaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.qwen35.config import Qwen35Config

Weights = dict[str, npt.NDArray[np.float32]]

_QWEN35 = {
    "vocab_size": 257,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "intermediate_size": 37,
    "attention_layers": (1,),
    "rope_theta": 1e4,
}
_LLAMA = {key: value for key, value in _QWEN35.items() if key != "attention_layers"}
_LFM2 = {**_QWEN35, "attention_layers": (0, 2)}
#: One, two and four queries to a key; as many value heads as key heads, twice and three times.
#: Sizes of heads that are whole vectors and others, and a model without attention.
CONFIGS: dict[str, BoundedConfig] = {
    "qwen35": Qwen35Config(
        **_QWEN35,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=18,
        rotary_dim=6,
        num_key_heads=2,
        num_value_heads=4,
        key_head_dim=6,
        value_head_dim=21,
        tied=False,
    ),
    "qwen35-square": Qwen35Config(
        **{**_QWEN35, "hidden_size": 64, "attention_layers": (1, 2)},
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        rotary_dim=16,
        num_key_heads=2,
        num_value_heads=2,
        key_head_dim=32,
        value_head_dim=128,
    ),
    "qwen35-three": Qwen35Config(
        **_QWEN35,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=40,
        rotary_dim=40,
        num_key_heads=1,
        num_value_heads=3,
        key_head_dim=17,
        value_head_dim=16,
        conv_size=2,
    ),
    "qwen35-linear": Qwen35Config(
        **{**_QWEN35, "attention_layers": ()},
        num_key_heads=2,
        num_value_heads=2,
        key_head_dim=8,
        value_head_dim=8,
    ),
    "lfm2": Lfm2Config(**_LFM2, num_attention_heads=4, num_key_value_heads=2, head_dim=6),
    "lfm2-square": Lfm2Config(
        **{**_LFM2, "hidden_size": 320},
        num_attention_heads=9,
        num_key_value_heads=1,
        head_dim=32,
        conv_size=5,
        tied=False,
    ),
    "lfm3": Lfm3Config(
        **{**_QWEN35, "num_hidden_layers": 4},
        window_layers=(0, 3),
        window=21,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        rotary_dim=4,
        window_rotary_dim=10,
        window_rope_theta=300.0,
        tied=False,
    ),
    "lfm3-square": Lfm3Config(
        **{**_QWEN35, "hidden_size": 320, "num_hidden_layers": 4},
        window_layers=(2,),
        window=80,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32,
        rotary_dim=32,
        window_rotary_dim=8,
        conv_size=3,
    ),
    "lfm3-windows": Lfm3Config(
        **{**_QWEN35, "attention_layers": (), "hidden_size": 64},
        window_layers=(0, 2),
        window=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        rotary_dim=0,
        window_rotary_dim=16,
        max_context=30,
        head_gates=False,
        post_norms=False,
    ),
    "granite": Mamba2HybridConfig(
        **_QWEN35,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_mamba_heads=6,
        mamba_head_dim=9,
        state_size=7,
        num_groups=2,
        embedding_scale=3.0,
        residual_scale=0.3,
        attention_scale=0.2,
    ),
    "granite-square": Mamba2HybridConfig(
        **{**_QWEN35, "hidden_size": 64, "attention_layers": (1, 2)},
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        rotary_dim=32,
        num_mamba_heads=8,
        mamba_head_dim=32,
        state_size=16,
        conv_size=2,
        tied=False,
    ),
    "nemotron": Mamba2HybridConfig(
        **{**_QWEN35, "num_hidden_layers": 4},
        mamba_layers=(0, 3),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        num_mamba_heads=6,
        mamba_head_dim=9,
        state_size=7,
        num_groups=3,
        tied=False,
    ),
    "falcon-h1": Mamba2HybridConfig(
        **{**_QWEN35, "attention_layers": (0, 1, 2)},
        mamba_layers=(0, 1, 2),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=18,
        rotary_dim=18,
        num_mamba_heads=4,
        mamba_head_dim=20,
        state_size=9,
        num_groups=2,
        mixer_norm=False,
        embedding_scale=0.5,
    ),
    "jamba": JambaConfig(
        **_QWEN35,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        inner_size=45,
        state_size=7,
        dt_rank=5,
        tied=False,
    ),
    "jamba-square": JambaConfig(
        **{**_QWEN35, "hidden_size": 64, "attention_layers": (0,)},
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        inner_size=128,
        state_size=16,
        dt_rank=32,
        conv_size=2,
    ),
    "llama": LlamaConfig(
        **_LLAMA,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        rope_factors=(1.0, 1.0, 3.0, 8.0, 8.0),
        unrotated_layers=(1,),
        qkv_bias=True,
        out_bias=True,
        tied=False,
    ),
    "llama-square": LlamaConfig(
        **{**_LLAMA, "hidden_size": 64},
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        qk_norm=True,
    ),
    "llama-windows": LlamaConfig(
        **_LLAMA,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        rope_factors=(1.0, 1.0, 3.0, 8.0, 8.0),
        unrotated_layers=(1,),
        max_context=90,
        windows=(LayerPlan(12, "relative", 14), LayerPlan(28, "delta", 6), LayerPlan(76)),
    ),
    "llama-windows-square": LlamaConfig(
        **{**_LLAMA, "hidden_size": 64},
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_context=200,
        windows=(LayerPlan(60, "delta", 32), LayerPlan(124, "relative", 128), LayerPlan(28)),
    ),
}


def config_of(name: str, context: int = 32, past: str = "slide") -> BoundedConfig:
    """The config with this bound, where it has attention."""
    config = CONFIGS[name]
    return config if config.constant_state else with_past(config, context, past)


@cache
def random_weights(name: str) -> Weights:
    """Those of one of `CONFIGS`."""
    return drawn_for(CONFIGS[name])


def drawn_for(config: BoundedConfig) -> Weights:
    """Weights of every kind, none zero, that keep the activations near one."""
    chance = np.random.default_rng(0)
    weights = {}
    for key, shape in config.weight_shapes().items():
        weight = chance.standard_normal(shape)
        if key.endswith("norm.weight"):
            weight = 1 + 0.2 * weight
        elif key.endswith(".bias"):
            weight = 0.2 * weight
        elif key.endswith("far.bias"):
            weight = 0.2 * weight - 1
        elif key.endswith("A_log"):
            weight = 0.7 * weight - 2
        elif key.endswith("conv"):
            weight = 0.5 * weight
        elif len(shape) == 2 and not key.startswith("embedding"):
            weight = weight * shape[1] ** -0.5
        weights[key] = weight.astype(np.float32)
    return weights
