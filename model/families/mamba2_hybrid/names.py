"""Where each weight of a hybrid over Mamba-2 is in folders of Hugging Face and in GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from model.architectures.hybrid import BoundedConfig
from model.families.mamba.read import GGUF, MambaNames, folder_names
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.foreign.hybrid_names import HybridNames, weight
from model.foreign.renamed import Part

_MIXER = "mixer."


def _of_mixer(names: MambaNames, prefix: str) -> dict[str, Part]:
    """Those of a mixer, whose keys have ``prefix`` in front, with neither."""
    return {
        ours.removeprefix(_MIXER): replace(part, keys=(part.keys[0].removeprefix(prefix),))
        for ours, part in names.inside.items()
        if ours.startswith(_MIXER)
    }


#: Of Mamba, the first or the second, in folders and in GGUF, and of attention.
FOLDER_MAMBA = _of_mixer(folder_names(()), _MIXER)
GGUF_MAMBA = _of_mixer(GGUF, "")
FOLDER_ATTENTION = {f"{ours}.weight": weight(f"{ours}_proj") for ours in "qkv"}
FOLDER_ATTENTION["out.weight"] = weight("o_proj")


@dataclass(frozen=True)
class Mamba2HybridNames(HybridNames):
    """``other`` is a Mamba-2, ``mlp`` a layer that is an MLP alone."""

    mlp: Mapping[str, Part] = field(default_factory=dict)

    def mixers(self, config: BoundedConfig) -> list[Mapping[str, Part]]:
        """See `HybridNames`; those of two mixers have theirs in front."""
        assert isinstance(config, Mamba2HybridConfig), config
        both = {f"attention.{ours}": part for ours, part in self.attention.items()}
        both |= {f"mamba.{ours}": part for ours, part in self.other.items()}
        kinds = {(True, True): both, (True, False): self.attention}
        kinds |= {(False, True): self.other, (False, False): self.mlp}
        pairs = zip(config.is_attention, config.is_mamba, strict=True)
        return [kinds[pair] for pair in pairs]


@dataclass(frozen=True)
class Multipliers:
    """Of Falcon-H1: what inputs and outputs of its linear maps are multiplied with.

    ``ssm`` are those of z, x, B, C and dt, ``mlp`` of the gate and of what leaves the MLP.
    """

    head: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5
    mlp: tuple[float, ...] = (1.0,) * 2


def inside(prefix: str, parts: Mapping[str, Part]) -> dict[str, Part]:
    """``parts`` whose keys begin with ``prefix``."""
    return {ours: replace(part, keys=(f"{prefix}.{part.keys[0]}",)) for ours, part in parts.items()}


def granite_names(logits_scaling: float) -> Mamba2HybridNames:
    """Those of Granite, whose logits are divided by ``logits_scaling``: here the norm before."""
    return Mamba2HybridNames(
        ends={
            "embedding.weight": weight("model.embed_tokens"),
            "norm.weight": Part(("model.norm.weight",), factor=1.0 / logits_scaling),
            "head.weight": weight("lm_head"),
        },
        block="model.layers.{}",
        both={
            "mixer_norm.weight": weight("input_layernorm"),
            "mlp_norm.weight": weight("post_attention_layernorm"),
            "mlp.gate.weight": weight("shared_mlp.input_linear", "first_half"),
            "mlp.up.weight": weight("shared_mlp.input_linear", "second_half"),
            "mlp.down.weight": weight("shared_mlp.output_linear"),
        },
        attention=inside("self_attn", FOLDER_ATTENTION),
        other=inside("mamba", FOLDER_MAMBA),
    )


def nemotron_names(prefix: str) -> Mamba2HybridNames:
    """Those of Nemotron-H; all but the head begin with ``prefix``."""
    return Mamba2HybridNames(
        ends={
            "embedding.weight": weight(f"{prefix}.embeddings"),
            "norm.weight": weight(f"{prefix}.norm_f"),
            "head.weight": weight("lm_head"),
        },
        block=f"{prefix}.layers.{{}}",
        both={"mixer_norm.weight": weight("norm")},
        attention=inside("mixer", FOLDER_ATTENTION),
        other=inside("mixer", FOLDER_MAMBA),
        mlp={f"{name}.weight": weight(f"mixer.{name}_proj") for name in ("up", "down")},
    )


def falcon_names(config: Mamba2HybridConfig, by: Multipliers) -> Mamba2HybridNames:
    """Those of Falcon-H1, whose multipliers are those of the weights here."""
    mamba = config.mamba
    writes = mamba.num_groups * mamba.state_size
    rows = (mamba.inner_size, mamba.inner_size, writes, writes, mamba.num_attention_heads)
    of_rows = [by.ssm_in * each for each, num in zip(by.ssm, rows, strict=True) for _ in range(num)]
    factors: dict[str, float | tuple[float, ...]] = {
        "q.weight": by.attention_in,
        "k.weight": by.attention_in * by.key,
        "v.weight": by.attention_in,
        "out.weight": by.attention_out,
    }
    attention = {ours: replace(p, factor=factors[ours]) for ours, p in FOLDER_ATTENTION.items()}
    in_weight, out_weight = FOLDER_MAMBA["in.weight"], FOLDER_MAMBA["out.weight"]
    other = FOLDER_MAMBA | {
        "in.weight": replace(in_weight, factor=tuple(of_rows)),
        "out.weight": replace(out_weight, factor=by.ssm_out),
    }
    gate, down = by.mlp
    return Mamba2HybridNames(
        ends={
            "embedding.weight": weight("model.embed_tokens"),
            "norm.weight": Part(("model.final_layernorm.weight",), factor=by.head),
            "head.weight": weight("lm_head"),
        },
        block="model.layers.{}",
        both={
            "mixer_norm.weight": weight("input_layernorm"),
            "mlp_norm.weight": weight("pre_ff_layernorm"),
            "mlp.gate.weight": Part(("feed_forward.gate_proj.weight",), factor=gate),
            "mlp.up.weight": weight("feed_forward.up_proj"),
            "mlp.down.weight": Part(("feed_forward.down_proj.weight",), factor=down),
        },
        attention=inside("self_attn", attention),
        other=inside("mamba", other),
    )


def gguf_names(logits_scaling: float = 1.0, mlp_norm: str = "ffn_norm.weight") -> Mamba2HybridNames:
    """Those of GGUF, where Falcon-H1 has another name for one norm."""
    return Mamba2HybridNames(
        ends={
            "embedding.weight": weight("token_embd"),
            "norm.weight": Part(("output_norm.weight",), factor=1.0 / logits_scaling),
            "head.weight": weight("output"),
        },
        block="blk.{}",
        both={
            "mixer_norm.weight": weight("attn_norm"),
            "mlp_norm.weight": Part((mlp_norm,)),
            **{f"mlp.{name}.weight": weight(f"ffn_{name}") for name in ("gate", "up", "down")},
        },
        attention={
            **{f"{name}.weight": weight(f"attn_{name}") for name in "qkv"},
            "out.weight": weight("attn_output"),
        },
        other=GGUF_MAMBA,
        mlp={f"{name}.weight": weight(f"ffn_{name}") for name in ("up", "down")},
    )
