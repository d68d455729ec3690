"""The state of one layer of each mechanism, by the formulas of their own files.

H heads, K key features and V = ``head_dim`` value features per head, F features
of a map. The state of a convolution is added by `model.attention.spec.Spec`.
"""

from __future__ import annotations

from model.attention.spec import AttentionConfig, Options, key_dim, num_features
from model.tensor_spec import DType, TensorSpec

State = dict[str, TensorSpec]


def _sums(config: AttentionConfig, features: int, dtype: DType = "float32") -> State:
    return {"S": _per_head(config, features, config.head_dim, dtype=dtype)}


def _per_head(config: AttentionConfig, *shape: int, dtype: DType = "float32") -> TensorSpec:
    return TensorSpec((config.num_attention_heads, *shape), dtype)


def linear_state(config: AttentionConfig, options: Options) -> State:
    """S [H, K, V] and, for a sum of the weights, z [H, K]; float64 because nothing decays."""
    state = _linear_state(config, num_features(config, options))
    if options["denominator"] == "tokens":
        del state["z"]
    return state


def taylor_state(config: AttentionConfig, options: Options) -> State:
    """As `linear_state` with one feature more, and those of each two channels for order 2."""
    dim = key_dim(config, options)
    pairs = dim * (dim + 1) // 2 if options["order"] == 2 else 0
    return linear_state(config, {**options, "features": 1 + dim + pairs})


def _linear_state(config: AttentionConfig, features: int) -> State:
    z = _per_head(config, features, dtype="float64")
    return {**_sums(config, features, "float64"), "z": z}


def exponential_state(config: AttentionConfig, options: Options) -> State:
    """Exponential features: S [H, F, V] and z [H, F] relative to max [H, F]."""
    features = num_features(config, options)
    return {**_linear_state(config, features), "max": _per_head(config, features)}


def soft_vq_state(config: AttentionConfig, options: Options) -> State:
    """As `exponential_state`, one feature per codeword."""
    return exponential_state(config, {"features": options["codewords"]})


def window_linear_state(config: AttentionConfig, options: Options) -> State:
    """A window of keys and values [W, H, K], and `exponential_state` of older ones if kept."""
    ring = TensorSpec((options["window"], config.num_attention_heads, config.head_dim))
    older = exponential_state(config, options) if options["older"] == "linear" else {}
    return {"k": ring, "v": ring, **older}


def vq_state(config: AttentionConfig, options: Options) -> State:
    """Codes and values of the window; counts and sums per codeword of what left it."""
    heads, dim, num_codes = config.num_attention_heads, config.head_dim, options["codewords"]
    return {
        "code": TensorSpec((options["window"], heads), "int64"),
        "v": TensorSpec((options["window"], heads, dim)),
        "count": _per_head(config, num_codes, dtype="int64"),
        "sum": _per_head(config, num_codes, dim, dtype="float64"),
    }


def cosformer_state(config: AttentionConfig, options: Options) -> State:
    """S [H, 2K, V] and z [H, 2K] of this epoch and of the one before it."""
    s = _per_head(config, 2 * config.head_dim, config.head_dim)
    z = _per_head(config, 2 * config.head_dim)
    return {"S": s, "z": z, "S_before": s, "z_before": z}


def decayed_state(config: AttentionConfig, options: Options) -> State:
    """S [H, K, V]."""
    return _sums(config, key_dim(config, options))


def normed_state(config: AttentionConfig, options: Options) -> State:
    """S [H, K, V], float64 because nothing decays."""
    return _sums(config, key_dim(config, options), "float64")


def softmax_state(config: AttentionConfig, options: Options) -> State:
    """The cache of an empty text."""
    empty = _per_head(config, 0, config.head_dim)
    return {"k": empty, "v": empty}
