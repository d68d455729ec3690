"""The names and shapes of the weights of `model.architectures.decoder`, known without torch."""

from __future__ import annotations

from collections.abc import Sequence

from model.architectures.config import Config
from model.tensor_spec import Shape


def decoder_shapes(
    config: Config, mixers: Sequence[dict[str, Shape]], tied: bool
) -> dict[str, Shape]:
    """The weights of a decoder of ``config`` whose mixers have these weights, by their names.

    A block has an MLP where the config has an ``intermediate_size``.
    """
    width, size = config.hidden_size, config.vocab_size
    inner: int = getattr(config, "intermediate_size", 0)
    shapes: dict[str, Shape] = {"embedding.weight": (size, width), "norm.weight": (width,)}
    if not tied:
        shapes["head.weight"] = (size, width)
    for layer, mixer in enumerate(mixers):
        block: dict[str, Shape] = {"mixer_norm.weight": (width,)}
        block |= {f"mixer.{name}": shape for name, shape in mixer.items()}
        if inner:
            block |= {"mlp_norm.weight": (width,), "mlp.down.weight": (width, inner)}
            block |= {f"mlp.{name}.weight": (inner, width) for name in ("gate", "up")}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def attention_shapes(
    width: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    gated: bool = False,
    qk_norm: bool = True,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> dict[str, Shape]:
    """The weights of `model.architectures.bounded_attention`, by their names in a mixer.

    With a gate each head has its rows after the query's.
    """
    rows = dict.fromkeys("qkv", num_kv_heads * head_dim)
    rows["q"] = num_heads * head_dim * (2 if gated else 1)
    shapes: dict[str, Shape] = {f"{name}.weight": (num, width) for name, num in rows.items()}
    shapes["out.weight"] = (width, num_heads * head_dim)
    if qkv_bias:
        shapes |= {f"{name}.bias": (num,) for name, num in rows.items()}
    if out_bias:
        shapes["out.bias"] = (width,)
    if qk_norm:
        shapes |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    return shapes
