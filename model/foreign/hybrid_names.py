"""Where each weight of a decoder is in the files of another project.

Most families have the names of Llama's folders (`folder_names`) and GGUF files (`GGUF`), or differ
in some (`HybridNames.but`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from model.architectures.config import Config
from model.architectures.hybrid import BoundedConfig
from model.foreign.weights import Part, Renamed, are_equal
from model.weights import CheckpointError, Weights, file_name

Parts = Mapping[str, Part]
NO_PARTS: Parts = {}
#: Matches no key.
NO_KEY = re.compile("(?!)")


@dataclass(frozen=True)
class HybridNames:
    """The parts of one kind of file by our names, those in a block without the block's.

    ``block`` is theirs, with ``{}`` for the layer. ``attention`` and ``other`` are the mixers of
    the two kinds of layers. Each config has some of the parts.
    """

    ends: Parts
    block: str
    both: Parts
    attention: Parts = field(default_factory=dict)
    other: Parts = field(default_factory=dict)

    def but(
        self,
        *,
        ends: Parts = NO_PARTS,
        both: Parts = NO_PARTS,
        attention: Parts = NO_PARTS,
        other: Parts = NO_PARTS,
    ) -> HybridNames:
        """The same with these parts too, in the place of those with their names."""
        return HybridNames(
            ends={**self.ends, **ends},
            block=self.block,
            both={**self.both, **both},
            attention={**self.attention, **attention},
            other={**self.other, **other},
        )

    def parts_of(self, config: Config) -> dict[str, Part]:
        """Of each weight that ``config`` lists."""
        parts, shapes = dict[str, Part](), config.weight_shapes()
        for ours in shapes:
            if ours in self.ends:
                parts[ours] = self.ends[ours]
                continue
            _, layer, name = ours.split(".", 2)
            is_attention = f"blocks.{layer}.mixer.q.weight" in shapes
            mixer = self.attention if is_attention else self.other
            part = self.both[name] if name in self.both else mixer[name.removeprefix("mixer.")]
            parts |= inside(self.block.format(layer), {ours: part})
        return parts

    def read(
        self,
        files: Weights,
        config: BoundedConfig,
        unused: re.Pattern[str] = NO_KEY,
        name: str = "",
    ) -> Renamed:
        """The weights of ``config`` in ``files``, which errors call ``name`` or by their own name.

        Keys that match ``unused`` may be left. Raises `CheckpointError` for other ones, and for
        what is missing or has another shape.
        """
        name, ours = name or file_name(files), Renamed(files, self.parts_of(config))
        left = {key for key in files if unused.fullmatch(key)}
        left |= _refuse_other_head(files, config, self, name)
        ours.check(name, config.weight_shapes(), left)
        return ours


def weight(key: str, form: str = "same") -> Part:
    """The tensor ``key.weight``."""
    return Part((f"{key}.weight",), form)


def weights_of(keys: Mapping[str, str], form: str = "same") -> dict[str, Part]:
    """The tensors ``key.weight``, by our names without ``weight``."""
    return {f"{ours}.weight": weight(key, form) for ours, key in keys.items()}


def with_bias(keys: Mapping[str, str]) -> dict[str, Part]:
    """The weights and biases of linear maps, by our names of these."""
    return weights_of(keys) | {f"{ours}.bias": Part((f"{key}.bias",)) for ours, key in keys.items()}


def inside(prefix: str, parts: Parts) -> dict[str, Part]:
    """``parts`` whose keys begin with ``prefix``."""
    return {
        ours: replace(part, keys=tuple(f"{prefix}.{key}" for key in part.keys))
        for ours, part in parts.items()
    }


#: Of attention in folders, in a layer's module for it.
FOLDER_ATTENTION = {
    **with_bias({**{name: f"{name}_proj" for name in "qkv"}, "out": "o_proj"}),
    **weights_of({"q_norm": "q_norm", "k_norm": "k_norm"}),
}


def _folder_mlp(module: str) -> dict[str, Part]:
    """The parts of a SwiGLU in folders, in a layer's ``module`` for it."""
    return weights_of({f"mlp.{name}": f"{module}.{name}_proj" for name in ("gate", "up", "down")})


def folder_names(prefix: str = "model.", norm_form: str = "same") -> HybridNames:
    """Those of Llama's folders, whose keys begin with ``prefix``, but for that of the head."""
    norms = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return HybridNames(
        ends={
            "embedding.weight": weight(f"{prefix}embed_tokens"),
            "norm.weight": weight(f"{prefix}norm", norm_form),
            "head.weight": weight("lm_head"),
        },
        block=f"{prefix}layers.{{}}",
        both={**weights_of(norms, norm_form), **_folder_mlp("mlp")},
        attention=inside("self_attn", FOLDER_ATTENTION),
    )


#: Of folders whose MLP is a ``feed_forward``, as Jamba and Falcon-H1 have it.
FEED_FORWARD_FOLDER = folder_names().but(
    ends={"norm.weight": weight("model.final_layernorm")},
    both={"mlp_norm.weight": weight("pre_ff_layernorm"), **_folder_mlp("feed_forward")},
)

#: Of GGUF, as llama.cpp's converter names the parts of a Llama.
GGUF = HybridNames(
    ends=weights_of({"embedding": "token_embd", "norm": "output_norm", "head": "output"}),
    block="blk.{}",
    both={
        **weights_of({"mixer_norm": "attn_norm", "mlp_norm": "ffn_norm"}),
        **weights_of({f"mlp.{name}": f"ffn_{name}" for name in ("gate", "up", "down")}),
    },
    attention={
        **with_bias({**{name: f"attn_{name}" for name in "qkv"}, "out": "attn_output"}),
        **weights_of({"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}),
    },
)


def _refuse_other_head(
    files: Weights, config: BoundedConfig, names: HybridNames, name: str
) -> set[str]:
    """The key of the head that a tied model's files may hold, as some hold the embedding twice.

    Raises `CheckpointError` where it is not the embedding.
    """
    (head,), (embedding,) = (names.ends[f"{key}.weight"].keys for key in ("head", "embedding"))
    if not config.tied or head not in files or embedding not in files:
        return set()
    if not are_equal(files, head, embedding):
        raise CheckpointError(
            f"{name}: {head} is not the embedding, though tie_word_embeddings is true"
        )
    return {head}
