"""Families of flash-linear-attention: gla, retnet, linear_attn, gated_deltanet, delta_net.

Theirs is our block: RMS norms, a SwiGLU and an attention with projections of
its own. Historical variants of the keys are read: until spring 2024 the
embedding was ``embed_tokens``; until February 2025 the MLP held gate and value
in one ``gate_proj``, since then with ``up_proj`` next to it; and the norm before
the output gate is ``g_norm_swish_gate`` where it is fused with the gate, else
``g_norm``. Grouped keys are repeated for each of their queries; in a gated_deltanet with more heads
of values than of keys, keys and queries for each of their values.

Hybrids with softmax layers and residuals over blocks (``attn``,
``attnres_block_size``) are refused, as are feature maps that are not in ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from model.architectures.config import MAX_SIZE
from model.config import ModelConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.weights import Weights
from model.weights import Array

#: Which kernel computes, and what training used. A shared convolution has other keys, which shows.
HARMLESS = (
    "share_conv_kernel",
    *("attn_mode", "fuse_swiglu", "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy"),
    *("use_l2warp", "max_position_embeddings", "rescale_prenorm_residual"),
    "prenorm_residual_strategy",
)

#: their ``feature_map`` -> our option ``map`` of `normed`.
MAPS = {"elementwise_product": "product", "elu": "elu", "relu": "relu", "identity": "identity"}


def read_gla(source: ForeignConfig, weights: Weights) -> tuple[ModelConfig, dict[str, Array]]:
    """Gated linear attention, as our ``gated`` without a convolution or with theirs."""
    _refuse_features(source)
    source.choice("clamp_min", None)
    source.choice("use_gk", True)
    source.choice("use_gv", False)
    conv_size = source.integer("conv_size", 4)
    conv_size = conv_size if source.boolean("use_short_conv", False) else 0
    shape = _Shape(source, "gated", expand_k=0.5, expand_v=1.0, hidden_ratio=4, num_heads=4)
    rank = weights.num_rows("model.layers.0.attn.gk_proj.0.weight")
    config = shape.config({"conv_size": conv_size, "decay_rank": rank})

    def attention(key: str) -> dict[str, Array]:
        block = {
            "decay_down.weight": weights.take(f"{key}.gk_proj.0.weight"),
            "decay_up.weight": weights.take_grouped(f"{key}.gk_proj.1.weight", *shape.groups),
            "decay_up.bias": weights.take_grouped(f"{key}.gk_proj.1.bias", *shape.groups),
            **shape.gate(key, weights),
        }
        if conv_size:
            convolutions = weights.join_qkv(f"{key}.{{}}_conv1d.weight", *shape.groups)
            block["conv_weight"] = convolutions.reshape(len(convolutions), -1)
        return block

    return config, shape.model(weights, attention)


def read_retnet(source: ForeignConfig, weights: Weights) -> tuple[ModelConfig, dict[str, Array]]:
    """RetNet, as our ``retnet`` with plain rotary positions instead of xPos."""
    _refuse_features(source)
    source.choice("use_short_conv", False)
    source.ignore("conv_size")
    shape = _Shape(source, "retnet", expand_k=1.0, expand_v=2.0, hidden_ratio=2, num_heads=8)
    config = shape.config({"positions": "rotary"})
    weights.drop(r"model\.layers\.\d+\.attn\.rotary\.inv_freq")
    return config, shape.model(weights, lambda key: shape.gate(key, weights))


def read_linear_attn(
    source: ForeignConfig, weights: Weights
) -> tuple[ModelConfig, dict[str, Array]]:
    """Linear attention with a norm in place of the denominator, as our ``normed``."""
    feature_map = source.choice("feature_map", *MAPS)
    for name in ("norm_q", "norm_k", "norm_feature_map"):
        source.choice(name, False)
    tied = source.boolean("tie_feature_map_qk", False)
    shape = _Shape(source, "normed", expand_k=1.0, expand_v=1.0, hidden_ratio=4, num_heads=4)
    config = shape.config({"map": MAPS[str(feature_map)]})

    def attention(key: str) -> dict[str, Array]:
        block = {"norm_weight": shape.norm_weight(weights, f"{key}.norm.weight")}
        if feature_map == "elementwise_product":
            for ours in ("q_map", "k_map"):
                theirs = f"{key}.feature_map_{ours[0]}"
                if tied and ours == "k_map" and not weights.has(f"{theirs}.layer1.weight"):
                    block.update({f"k_map.both.{n}": block[f"q_map.both.{n}"] for n in KINDS})
                    continue
                for kind in KINDS:
                    layers = (f"{theirs}.layer{n}.{kind}" for n in (1, 2))
                    block[f"{ours}.both.{kind}"] = weights.join(*layers)
        return block

    return config, shape.model(weights, attention)


def read_gated_deltanet(
    source: ForeignConfig, weights: Weights
) -> tuple[ModelConfig, dict[str, Array]]:
    """Gated DeltaNet, as our ``delta``."""
    source.choice("use_mamba_gate", True)
    shape = _GroupedValues(source, "delta", hidden_ratio=4)
    config, attention = _delta(shape, weights, use_gate=True, decay=True)
    return config, shape.model(weights, attention)


def read_delta_net(source: ForeignConfig, weights: Weights) -> tuple[ModelConfig, dict[str, Array]]:
    """DeltaNet, as our ``delta`` without a decay."""
    for name, only in (("qk_norm", "l2"), ("qk_activation", "silu"), ("use_rope", False)):
        source.choice(name, only)
    source.choice("use_beta", True)
    source.choice("use_output_norm", True)
    source.ignore("chunk_size")
    shape = _Shape(source, "delta", expand_k=1.0, expand_v=1.0, hidden_ratio=4, num_heads=16)
    config, attention = _delta(shape, weights, use_gate=False, decay=False)
    return config, shape.model(weights, attention)


def _delta(
    shape: _Shape, weights: Weights, use_gate: bool, decay: bool
) -> tuple[ModelConfig, Callable[[str], dict[str, Array]]]:
    """The config, and what gives a layer's weights. ``use_gate`` is the default of theirs."""
    source = shape.source
    source.choice("use_short_conv", True)
    source.choice("conv_bias", False)
    options: dict[str, Any] = {"conv_size": source.integer("conv_size", 4), "decay": decay}
    if not source.boolean("use_gate", use_gate):
        options["gate"] = False
    if source.boolean("allow_neg_eigval", False):
        options["negative_eigenvalues"] = True
    config = shape.config(options)

    def attention(key: str) -> dict[str, Array]:
        convolutions = shape.join_qkv(weights, f"{key}.{{}}_conv1d.weight")
        block = {
            "norm_weight": weights.take(f"{key}.o_norm.weight"),
            "conv_weight": convolutions.reshape(len(convolutions), -1),
            "beta.weight": weights.take(f"{key}.b_proj.weight"),
        }
        if "gate" not in options:
            block["gate.weight"] = weights.take(f"{key}.g_proj.weight")
        if decay:
            block["decay.weight"] = weights.take(f"{key}.a_proj.weight")
            block["decay.bias"] = weights.take(f"{key}.dt_bias")
            block["decay_log"] = weights.take(f"{key}.A_log")
        return block

    return config, attention


KINDS = ("weight", "bias")


def _refuse_features(source: ForeignConfig) -> None:
    source.choice("feature_map", None)
    source.choice("use_output_gate", True)


class _Shape:
    """What the families share: sizes, the MLP, the norms and the projections."""

    #: Which of q, k and v have fewer heads than the others, where there are fewer.
    grouped = "kv"

    def __init__(
        self,
        source: ForeignConfig,
        attention: str,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        hidden_ratio: int = 4,
        num_heads: int = 1,
    ) -> None:
        self.source, self.attention = source, attention
        source.ignore(*HARMLESS)
        source.choice("hidden_act", "swish")
        source.choice("attn", None)
        source.choice("attnres_block_size", None)
        self.affine = source.boolean("elementwise_affine", True)
        self.width = source.integer("hidden_size", 2048)
        self._read_heads(num_heads, expand_k, expand_v)
        ratio = source.integer("hidden_ratio", hidden_ratio)
        rounded = 256 * -(-int(self.width * ratio * 2 / 3) // 256)
        self.intermediate_size = source.integer("intermediate_size", rounded)
        self.tied = source.boolean("tie_word_embeddings", False)
        older = source.number("rms_norm_eps", 1e-6)  # its name until spring 2024
        self.norm_eps = source.number("norm_eps", older)
        self.num_layers = source.num_layers("num_hidden_layers", 24)

    def _read_heads(self, num_heads: int, expand_k: float, expand_v: float) -> None:
        source = self.source
        self.heads = source.integer("num_heads", num_heads)
        self.kv_heads = source.integer("num_kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{source.family}: num_kv_heads must divide {self.heads}, not {self.kv_heads}"
            )
        #: Heads of keys and values, and for how many queries each is.
        self.groups = (self.kv_heads, self.heads // self.kv_heads)
        self.key_dim = self._per_head("expand_k", expand_k)
        self.value_dim = self._per_head("expand_v", expand_v)

    def _per_head(self, name: str, default: float) -> int:
        total = self.width * self.source.number(name, default)
        if not 0 < total <= MAX_SIZE or total != int(total) or int(total) % self.heads:
            raise ConfigError(
                f"{self.source.family}: {name} times {self.width} must divide into"
                f" {self.heads} heads, {total:g} does not"
            )
        return int(total) // self.heads

    def config(self, options: dict[str, Any]) -> ModelConfig:
        vocab_size = self.source.integer("vocab_size")
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.heads,
            head_dim=self.value_dim,
            intermediate_size=self.intermediate_size,
            attention=self.attention,
            attention_options={"key_dim": self.key_dim, **options},
            rms_norm_eps=self.norm_eps,
            tie_word_embeddings=self.tied,
            bos_token_id=self.source.special_id("bos_token_id", vocab_size),
            eos_token_id=self.source.special_id("eos_token_id", vocab_size),
        )

    def join_qkv(self, weights: Weights, pattern: str) -> Array:
        """Rows of q, k and v, each with as many heads as any of them."""
        return weights.join_qkv(pattern, *self.groups, self.grouped)

    def norm_weight(self, weights: Weights, *names: str) -> Array:
        if self.affine:
            return weights.take(*names)
        return np.broadcast_to(np.float32(1), self.value_dim)  # no memory for a config's word

    def gate(self, key: str, weights: Weights) -> dict[str, Array]:
        """The output gate and the norm before it."""
        names = (f"{key}.g_norm_swish_gate.weight", f"{key}.g_norm.weight")
        return {
            "gate.weight": weights.take(f"{key}.g_proj.weight"),
            "norm_weight": self.norm_weight(weights, *names),
        }

    def model(
        self, weights: Weights, attention: Callable[[str], dict[str, Array]]
    ) -> dict[str, Array]:
        """All our weights; ``attention`` gives those of a layer except its projections."""
        ours = {
            "embedding.weight": weights.take(
                "model.embeddings.weight", "model.embed_tokens.weight"
            ),
            "norm.weight": weights.take("model.norm.weight"),
        }
        for layer in range(self.num_layers):
            key = f"model.layers.{layer}"
            block = {
                "attention_norm.weight": weights.take(f"{key}.attn_norm.weight"),
                "mlp_norm.weight": weights.take(f"{key}.mlp_norm.weight"),
                "mlp.up.weight": _gate_and_value(f"{key}.mlp", weights),
                "mlp.down.weight": weights.take(f"{key}.mlp.down_proj.weight"),
                "attention.qkv.weight": self.join_qkv(weights, f"{key}.attn.{{}}_proj.weight"),
                "attention.out.weight": weights.take(f"{key}.attn.o_proj.weight"),
                **{f"attention.{n}": t for n, t in attention(f"{key}.attn").items()},
            }
            ours.update({f"blocks.{layer}.{name}": tensor for name, tensor in block.items()})
        return {**ours, **weights.head(self.tied, ours["embedding.weight"])}


class _GroupedValues(_Shape):
    """The sizes of gated_deltanet, where several heads of values may share one of keys."""

    grouped = "qk"

    def _read_heads(self, num_heads: int, expand_k: float, expand_v: float) -> None:
        source = self.source
        keys = source.integer("num_heads", 6)
        self.heads = source.integer("num_v_heads", keys)
        if self.heads % keys:
            raise ConfigError(
                f"{source.family}: num_heads must divide num_v_heads {self.heads}, not {keys}"
            )
        self.groups = (keys, self.heads // keys)
        self.key_dim = source.integer("head_dim", 256)
        width = self.key_dim * source.number("expand_v", 2.0)
        if not 0 < width <= MAX_SIZE or width != int(width):
            raise ConfigError(
                f"{source.family}: expand_v times {self.key_dim} must be a whole number, not"
                f" {width:g}"
            )
        self.value_dim = int(width)


def _gate_and_value(key: str, weights: Weights) -> Array:
    """[2 I, D], stored as one matrix or, later, as two."""
    names = (f"{key}.gate_proj.weight", f"{key}.up_proj.weight")
    return weights.join(*names) if weights.has(names[1]) else weights.take(names[0])
