"""The keys of LFM2 files, and which of our weights each is."""

from __future__ import annotations

from model.foreign.hybrid_names import HybridNames, weight

FOLDER = HybridNames(
    ends={
        "embedding.weight": weight("model.embed_tokens"),
        "norm.weight": weight("model.embedding_norm"),
        "head.weight": weight("lm_head"),
    },
    block="model.layers.{}",
    both={
        "mixer_norm.weight": weight("operator_norm"),
        "mlp_norm.weight": weight("ffn_norm"),
        "mlp.gate.weight": weight("feed_forward.w1"),
        "mlp.up.weight": weight("feed_forward.w3"),
        "mlp.down.weight": weight("feed_forward.w2"),
    },
    attention={
        **{f"{name}.weight": weight(f"self_attn.{name}_proj") for name in "qkv"},
        "out.weight": weight("self_attn.out_proj"),
        "q_norm.weight": weight("self_attn.q_layernorm"),
        "k_norm.weight": weight("self_attn.k_layernorm"),
    },
    other={
        "in.weight": weight("conv.in_proj"),
        "conv": weight("conv.conv", "squeezed"),
        "out.weight": weight("conv.out_proj"),
    },
)

GGUF = HybridNames(
    ends={
        "embedding.weight": weight("token_embd"),
        "norm.weight": weight("token_embd_norm"),
        "head.weight": weight("output"),
    },
    block="blk.{}",
    both={
        "mixer_norm.weight": weight("attn_norm"),
        "mlp_norm.weight": weight("ffn_norm"),
        **{f"mlp.{name}.weight": weight(f"ffn_{name}") for name in ("gate", "up", "down")},
    },
    attention={
        **{f"{name}.weight": weight(f"attn_{name}") for name in "qkv"},
        "out.weight": weight("attn_output"),
        "q_norm.weight": weight("attn_q_norm"),
        "k_norm.weight": weight("attn_k_norm"),
    },
    other={
        "in.weight": weight("shortconv.in_proj"),
        "conv": weight("shortconv.conv", "squeezed"),
        "out.weight": weight("shortconv.out_proj"),
    },
)
