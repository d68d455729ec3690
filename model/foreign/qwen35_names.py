"""The keys of Qwen3.5 files, and which of our weights each is."""

from __future__ import annotations

from model.foreign.hybrid_names import HybridNames, weight
from model.foreign.renamed import Part


def folder_names(prefix: str) -> HybridNames:
    """Those of Hugging Face folders, whose text model's keys begin with ``prefix``.

    All norms but that of the gated delta net are stored less one.
    """
    return HybridNames(
        ends={
            "embedding.weight": weight(f"{prefix}embed_tokens"),
            "norm.weight": weight(f"{prefix}norm", "plus_one"),
            "head.weight": weight("lm_head"),
        },
        block=f"{prefix}layers.{{}}",
        both={
            "mixer_norm.weight": weight("input_layernorm", "plus_one"),
            "mlp_norm.weight": weight("post_attention_layernorm", "plus_one"),
            **{f"mlp.{name}.weight": weight(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
        },
        attention={
            **{f"{name}.weight": weight(f"self_attn.{name}_proj") for name in "qkv"},
            "out.weight": weight("self_attn.o_proj"),
            "q_norm.weight": weight("self_attn.q_norm", "plus_one"),
            "k_norm.weight": weight("self_attn.k_norm", "plus_one"),
        },
        other={
            **{
                f"{name}.weight": weight(f"linear_attn.in_proj_{name}")
                for name in ("qkv", "z", "b", "a")
            },
            "conv": weight("linear_attn.conv1d", "squeezed"),
            "A_log": Part(("linear_attn.A_log",)),
            "dt_bias": Part(("linear_attn.dt_bias",)),
            "norm.weight": weight("linear_attn.norm"),
            "out.weight": weight("linear_attn.out_proj"),
        },
    )


#: Of GGUF, where all norms are what the model multiplies with.
GGUF = HybridNames(
    ends={
        "embedding.weight": weight("token_embd"),
        "norm.weight": weight("output_norm"),
        "head.weight": weight("output"),
    },
    block="blk.{}",
    both={
        "mixer_norm.weight": weight("attn_norm"),
        "mlp_norm.weight": weight("post_attention_norm"),
        **{f"mlp.{name}.weight": weight(f"ffn_{name}") for name in ("gate", "up", "down")},
    },
    attention={
        **{f"{name}.weight": weight(f"attn_{name}") for name in "qkv"},
        "out.weight": weight("attn_output"),
        "q_norm.weight": weight("attn_q_norm"),
        "k_norm.weight": weight("attn_k_norm"),
    },
    other={
        "qkv.weight": weight("attn_qkv"),
        "z.weight": weight("attn_gate"),
        "b.weight": weight("ssm_beta"),
        "a.weight": weight("ssm_alpha"),
        "conv": weight("ssm_conv1d"),
        "A_log": Part(("ssm_a",), "log_negative"),
        "dt_bias": Part(("ssm_dt.bias",)),
        "norm.weight": weight("ssm_norm"),
        "out.weight": weight("ssm_out"),
    },
)
