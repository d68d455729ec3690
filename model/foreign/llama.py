"""Llama in its Hugging Face layout, as our softmax model with rotary positions.

Grouped keys and values are repeated for each of their queries: the same
function, with a larger ``qkv``. A mechanism with a constant state keeps one
state per head of queries anyway.
"""

from __future__ import annotations

from model.config import ModelConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.rotary import read_rotary
from model.foreign.weights import Weights
from model.weights import Array

#: `max_position_embeddings` is how long its training texts were, no table.
HARMLESS = ("attention_dropout", "max_position_embeddings", "pretraining_tp")


def read_llama(source: ForeignConfig, weights: Weights) -> tuple[ModelConfig, dict[str, Array]]:
    """See the module's docstring."""
    num_kv_heads = source.anything("num_key_value_heads")
    config = _config(source)
    heads = config.num_attention_heads
    num_kv_heads = heads if num_kv_heads is None else num_kv_heads
    if type(num_kv_heads) is not int or num_kv_heads < 1 or heads % num_kv_heads:
        raise ConfigError(f"llama: num_key_value_heads must divide {heads}, not {num_kv_heads!r}")
    weights.drop(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    ours = {
        "embedding.weight": weights.take("model.embed_tokens.weight"),
        "norm.weight": weights.take("model.norm.weight"),
    }
    for layer in range(config.num_hidden_layers):
        theirs = f"model.layers.{layer}"
        block = {
            "attention_norm.weight": weights.take(f"{theirs}.input_layernorm.weight"),
            "mlp_norm.weight": weights.take(f"{theirs}.post_attention_layernorm.weight"),
            "mlp.up.weight": weights.join(
                *(f"{theirs}.mlp.{name}_proj.weight" for name in ("gate", "up"))
            ),
            "mlp.down.weight": weights.take(f"{theirs}.mlp.down_proj.weight"),
        }
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            block[f"attention.qkv.{kind}"] = weights.join_qkv(
                f"{theirs}.self_attn.{{}}_proj.{kind}", num_kv_heads, heads // num_kv_heads
            )
            block[f"attention.out.{kind}"] = weights.take(f"{theirs}.self_attn.o_proj.{kind}")
        ours.update({f"blocks.{layer}.{name}": tensor for name, tensor in block.items()})
    ours.update(weights.head(config.tie_word_embeddings, ours["embedding.weight"]))
    return config, ours


def _config(source: ForeignConfig) -> ModelConfig:
    source.ignore(*HARMLESS)
    source.choice("hidden_act", "silu")
    source.choice("mlp_bias", False)
    vocab_size, width = source.integer("vocab_size"), source.integer("hidden_size")
    heads = source.integer("num_attention_heads")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=source.num_layers("num_hidden_layers"),
        num_attention_heads=heads,
        head_dim=source.integer("head_dim", width // heads),
        intermediate_size=source.integer("intermediate_size"),
        attention="softmax",
        attention_options={"rope_theta": read_rotary(source, 10_000.0).theta},
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=source.boolean("tie_word_embeddings", False),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
        attention_bias=source.boolean("attention_bias", False),
    )
