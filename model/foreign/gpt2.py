"""GPT-2 in its Hugging Face layout, as our softmax model with learned positions.

Its linear layers are stored as [in, out], transposed to ours. The first
checkpoints have no ``transformer.`` before their keys, and hold causal masks.
"""

from __future__ import annotations

import numpy as np

from model.config import ModelConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.weights import Weights
from model.weights import Array

#: Dropout, heads for other tasks, and caches: nothing that inference computes.
HARMLESS = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "summary_type", "summary_use_proj"),
    *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    "reorder_and_upcast_attn",
)

#: ours -> theirs, within a layer; those of `TRANSPOSED` are stored as [in, out].
LAYER = {
    "attention_norm.weight": "ln_1.weight",
    "attention_norm.bias": "ln_1.bias",
    "attention.qkv.weight": "attn.c_attn.weight",
    "attention.qkv.bias": "attn.c_attn.bias",
    "attention.out.weight": "attn.c_proj.weight",
    "attention.out.bias": "attn.c_proj.bias",
    "mlp_norm.weight": "ln_2.weight",
    "mlp_norm.bias": "ln_2.bias",
    "mlp.up.weight": "mlp.c_fc.weight",
    "mlp.up.bias": "mlp.c_fc.bias",
    "mlp.down.weight": "mlp.c_proj.weight",
    "mlp.down.bias": "mlp.c_proj.bias",
}
TRANSPOSED = ("qkv.weight", "out.weight", "up.weight", "down.weight")


def read_gpt2(source: ForeignConfig, weights: Weights) -> tuple[ModelConfig, dict[str, Array]]:
    """See the module's docstring."""
    config = _config(source)
    weights.without_prefix("transformer.")
    weights.drop(r"h\.\d+\.attn\.(bias|masked_bias)")
    ours = {
        "embedding.weight": weights.take("wte.weight"),
        "position_embedding.weight": weights.take("wpe.weight"),
        "norm.weight": weights.take("ln_f.weight"),
        "norm.bias": weights.take("ln_f.bias"),
    }
    for layer in range(config.num_hidden_layers):
        for name, theirs in LAYER.items():
            tensor = weights.take(f"h.{layer}.{theirs}")
            if name.endswith(TRANSPOSED):
                tensor = np.ascontiguousarray(
                    tensor.T
                )  # of any shape: a wrong one is refused later
            ours[f"blocks.{layer}.{name}"] = tensor
    ours.update(weights.head(config.tie_word_embeddings, ours["embedding.weight"]))
    return config, ours


def _config(source: ForeignConfig) -> ModelConfig:
    source.ignore(*HARMLESS)
    source.choice("activation_function", "gelu_new", "gelu_pytorch_tanh")
    source.choice("scale_attn_weights", True)
    source.choice("scale_attn_by_inverse_layer_idx", False)
    source.choice("add_cross_attention", False)
    vocab_size, width = source.integer("vocab_size"), source.integer("n_embd")
    heads = source.integer("n_head")
    if width % heads:
        raise ConfigError(f"gpt2: n_head must divide n_embd {width}, not {heads}")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=source.num_layers("n_layer"),
        num_attention_heads=heads,
        head_dim=width // heads,
        intermediate_size=source.integer("n_inner", 4 * width),
        attention="softmax",
        attention_options={"rotary": "none"},
        rms_norm_eps=source.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=source.boolean("tie_word_embeddings", True),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
        attention_bias=True,
        norm="layer",
        mlp="gelu",
        max_position_embeddings=source.integer("n_positions", 1024),
    )
