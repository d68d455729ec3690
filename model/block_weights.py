"""The names and shapes of the weights of `model.lm.LanguageModel`, without torch."""

from __future__ import annotations

from model.attention import spec_of
from model.attention.spec import Shape
from model.config import ModelConfig


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The names and shapes of all weights of a model, as a checkpoint holds them."""
    width, inner = config.hidden_size, config.intermediate_size
    gelu = config.mlp == "gelu"
    block = {
        **_norm("attention_norm", config),
        **_norm("mlp_norm", config),
        "mlp.up.weight": (inner if gelu else 2 * inner, width),
        "mlp.down.weight": (width, inner),
        **({"mlp.up.bias": (inner,), "mlp.down.bias": (width,)} if gelu else {}),
    }
    attention = spec_of(config.attention).weight_shapes(config)
    block |= {f"attention.{name}": shape for name, shape in attention.items()}
    shapes = {"embedding.weight": (config.vocab_size, width), **_norm("norm", config)}
    if config.max_position_embeddings:
        shapes["position_embedding.weight"] = (config.max_position_embeddings, width)
    if not config.tie_word_embeddings:
        shapes["head.weight"] = (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def _norm(name: str, config: ModelConfig) -> dict[str, Shape]:
    kinds = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}
