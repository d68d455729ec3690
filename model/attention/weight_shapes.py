"""The weights of one layer of each mechanism, by name, as a checkpoint holds them.

H heads, K key features and V = ``head_dim`` value features per head, F features
of a map, D model width.
"""

from __future__ import annotations

from model.attention.spec import AttentionConfig, Options, key_dim, num_features, qkv_rows
from model.tensor_spec import Shape

Weights = dict[str, Shape]


def heads_weights(config: AttentionConfig, options: Options) -> Weights:
    """``qkv`` [H (2 K + V), D] and ``out`` [D, H V], and what the options of all add."""
    rows, width = qkv_rows(config, options), config.num_attention_heads * config.head_dim
    shapes: Weights = {
        "qkv.weight": (rows, config.hidden_size),
        "out.weight": (config.hidden_size, width),
    }
    if config.attention_bias:
        shapes |= {"qkv.bias": (rows,), "out.bias": (config.hidden_size,)}
    if options["conv_size"]:
        shapes["conv_weight"] = (rows, options["conv_size"])
    if options["gate"]:
        shapes["gate.weight"] = (width, config.hidden_size)
    if options.get("norm", True):
        shapes["norm_weight"] = (config.head_dim,)
    return shapes


def gated_weights(config: AttentionConfig, options: Options) -> Weights:
    """A decay of low rank per channel."""
    keys = config.num_attention_heads * key_dim(config, options)
    return {
        **heads_weights(config, options),
        "decay_down.weight": (options["decay_rank"], config.hidden_size),
        "decay_up.weight": (keys, options["decay_rank"]),
        "decay_up.bias": (keys,),
    }


def delta_weights(config: AttentionConfig, options: Options) -> Weights:
    """A gate beta per head and, where there is one, a decay per head or per channel."""
    heads, keys = config.num_attention_heads, key_dim(config, options)
    shapes = heads_weights(config, options)
    shapes["beta.weight"] = (heads, config.hidden_size)
    if options["channel_decay"]:
        shapes |= {
            "decay_down.weight": (keys, config.hidden_size),
            "decay_up.weight": (heads * keys, keys),
            "decay_up.bias": (heads * keys,),
        }
    elif options["decay"]:
        shapes |= {"decay.weight": (heads, config.hidden_size), "decay.bias": (heads,)}
    if options["decay"]:
        shapes["decay_log"] = (heads,)
    return shapes


def dijiang_weights(config: AttentionConfig, options: Options) -> Weights:
    """A weight per frequency, learned for each head or drawn once for all."""
    dim = config.head_dim
    weights: Weights = {"frequency_weight": (config.num_attention_heads, dim)}
    if options["published"]:
        weights = {"frequency_draw": (dim,)}
    return {**heads_weights(config, options), **weights}


def normed_weights(config: AttentionConfig, options: Options) -> Weights:
    """The affine maps of map "product"."""
    shapes, keys = heads_weights(config, options), key_dim(config, options)
    if options["map"] == "product":
        for name in ("q_map", "k_map"):
            shapes[f"{name}.both.weight"] = (2 * keys, keys)
            shapes[f"{name}.both.bias"] = (2 * keys,)
    return shapes


def projected_weights(config: AttentionConfig, options: Options) -> Weights:
    """A projection [H, F, K] of random features."""
    shape = (config.num_attention_heads, num_features(config, options), config.head_dim)
    return {**heads_weights(config, options), "projection": shape}


def performer_weights(config: AttentionConfig, options: Options) -> Weights:
    """As `projected_weights`; a row gives two features where both its signs are taken."""
    features = num_features(config, options)
    rows = features // 2 if options["map"] == "hyperbolic" else features
    return projected_weights(config, {**options, "features": rows})


def window_linear_weights(config: AttentionConfig, options: Options) -> Weights:
    """As `projected_weights`, where something is kept of older tokens."""
    kept = options["older"] == "linear"
    return (projected_weights if kept else heads_weights)(config, options)


def soft_vq_weights(config: AttentionConfig, options: Options) -> Weights:
    """A codebook [H, C, K] and its priors [H, C]."""
    heads, num_codes = config.num_attention_heads, options["codewords"]
    return {
        **heads_weights(config, options),
        "codebook": (heads, num_codes, config.head_dim),
        "log_prior": (heads, num_codes),
    }


def vq_weights(config: AttentionConfig, options: Options) -> Weights:
    """A codebook [H, C, K], how much each codeword is used, and a bias per distance."""
    heads, num_codes = config.num_attention_heads, options["codewords"]
    return {
        **heads_weights(config, options),
        "codebook": (heads, num_codes, config.head_dim),
        "ema_count": (heads, num_codes),
        "bias": (heads, options["window"]),
    }
