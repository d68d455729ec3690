"""The keys of Llama files, and which of our weights each is."""

from __future__ import annotations

from model.foreign.hybrid_names import HybridNames, weight, with_bias

FOLDER = HybridNames(
    ends={
        "embedding.weight": weight("model.embed_tokens"),
        "norm.weight": weight("model.norm"),
        "head.weight": weight("lm_head"),
    },
    block="model.layers.{}",
    both={
        "mixer_norm.weight": weight("input_layernorm"),
        "mlp_norm.weight": weight("post_attention_layernorm"),
        **{f"mlp.{name}.weight": weight(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
    },
    attention={
        **with_bias({name: f"self_attn.{name}_proj" for name in "qkv"}),
        **with_bias({"out": "self_attn.o_proj"}),
        "q_norm.weight": weight("self_attn.q_norm"),
        "k_norm.weight": weight("self_attn.k_norm"),
    },
)

GGUF = HybridNames(
    ends={
        "embedding.weight": weight("token_embd"),
        "norm.weight": weight("output_norm"),
        "head.weight": weight("output"),
    },
    block="blk.{}",
    both={
        "mixer_norm.weight": weight("attn_norm"),
        "mlp_norm.weight": weight("ffn_norm"),
        **{f"mlp.{name}.weight": weight(f"ffn_{name}") for name in ("gate", "up", "down")},
    },
    attention={
        **with_bias({name: f"attn_{name}" for name in "qkv"}),
        **with_bias({"out": "attn_output"}),
        "q_norm.weight": weight("attn_q_norm"),
        "k_norm.weight": weight("attn_k_norm"),
    },
)
