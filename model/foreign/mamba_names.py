"""The keys of Mamba files, and which of our weights each is."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np

from model.architectures.mamba.config import MambaConfig
from model.architectures.mamba2.config import Mamba2Config
from model.foreign.renamed import Part
from model.weights import Array, CheckpointError, StoredWeights, shape_in

#: Read at a time where a large tensor is looked through.
_ROWS = 4096


@dataclass(frozen=True)
class MambaNames:
    """The parts of one kind of file by our names, those in a block without the block's.

    ``block`` is theirs, with ``{}`` for the layer. Each of Mamba-1 and Mamba-2 has some of
    ``inside``.
    """

    ends: Mapping[str, Part]
    block: str
    inside: Mapping[str, Part]

    def parts_of(self, config: MambaConfig | Mamba2Config) -> dict[str, Part]:
        """Of each weight that ``config`` lists."""
        parts: dict[str, Part] = {}
        for ours in config.weight_shapes():
            if ours in self.ends:
                parts[ours] = self.ends[ours]
                continue
            _, layer, name = ours.split(".", 2)
            part = self.inside[name]
            keys = tuple(f"{self.block.format(layer)}.{key}" for key in part.keys)
            parts[ours] = Part(keys, part.form)
        return parts


def folder_names(keys: Container[str]) -> MambaNames:
    """Those of folders with these ``keys``.

    The embedding has one name in transformers and another in state-spaces' own files; Codestral's
    own file has a prefix.
    """
    prefix = "model." if "model.backbone.norm_f.weight" in keys else ""
    has_own_name = f"{prefix}backbone.embedding.weight" in keys
    embedding = "embedding" if has_own_name else "embeddings"
    return MambaNames(
        ends={
            "embedding.weight": Part((f"{prefix}backbone.{embedding}.weight",)),
            "norm.weight": Part((f"{prefix}backbone.norm_f.weight",)),
            "head.weight": Part((f"{prefix}lm_head.weight",)),
        },
        block=f"{prefix}backbone.layers.{{}}",
        inside={
            "mixer_norm.weight": Part(("norm.weight",)),
            "mixer.in.weight": Part(("mixer.in_proj.weight",)),
            "mixer.conv": Part(("mixer.conv1d.weight",), "squeezed"),
            "mixer.conv_bias": Part(("mixer.conv1d.bias",)),
            "mixer.x.weight": Part(("mixer.x_proj.weight",)),
            "mixer.dt.weight": Part(("mixer.dt_proj.weight",)),
            "mixer.dt.bias": Part(("mixer.dt_proj.bias",)),
            **{f"mixer.{n}": Part((f"mixer.{n}",)) for n in ("dt_bias", "A_log", "D")},
            "mixer.norm.weight": Part(("mixer.norm.weight",)),
            "mixer.out.weight": Part(("mixer.out_proj.weight",)),
        },
    )


#: Of GGUF, which has A in the place of its logarithm, and vectors of Mamba-2 as columns.
GGUF = MambaNames(
    ends={
        "embedding.weight": Part(("token_embd.weight",)),
        "norm.weight": Part(("output_norm.weight",)),
        "head.weight": Part(("output.weight",)),
    },
    block="blk.{}",
    inside={
        "mixer_norm.weight": Part(("attn_norm.weight",)),
        "mixer.in.weight": Part(("ssm_in.weight",)),
        "mixer.conv": Part(("ssm_conv1d.weight",)),
        "mixer.conv_bias": Part(("ssm_conv1d.bias",)),
        "mixer.x.weight": Part(("ssm_x.weight",)),
        "mixer.dt.weight": Part(("ssm_dt.weight",)),
        "mixer.dt.bias": Part(("ssm_dt.bias",)),
        "mixer.dt_bias": Part(("ssm_dt.bias",)),
        "mixer.A_log": Part(("ssm_a",), "log_negative"),
        "mixer.D": Part(("ssm_d",), "column"),
        "mixer.norm.weight": Part(("ssm_norm.weight",), "flattened"),
        "mixer.out.weight": Part(("ssm_out.weight",)),
    },
)


def is_embedding(files: Mapping[str, Array], names: MambaNames) -> bool:
    """Whether the head, which ``files`` have, has the numbers of the embedding."""
    (head,), (embedding,) = (names.ends[f"{key}.weight"].keys for key in ("head", "embedding"))
    if embedding not in files or shape_in(files, head) != shape_in(files, embedding):
        return False
    (num_rows, *_) = shape_in(files, head) or (0,)
    return all(
        np.array_equal(_rows(files, head, begin), _rows(files, embedding, begin))
        for begin in range(0, num_rows, _ROWS)
    )


def unused_keys(files: Mapping[str, Array], names: MambaNames, tied: bool, name: str) -> set[str]:
    """The key of the head that a tied model's files may hold, as some hold the embedding twice.

    Raises `CheckpointError` where it is not the embedding.
    """
    (head,) = names.ends["head.weight"].keys
    if not tied or head not in files:
        return set()
    if not is_embedding(files, names):
        raise CheckpointError(f"{name}: {head} is not the embedding, though they are tied")
    return {head}


def _rows(files: Mapping[str, Array], key: str, begin: int) -> Array:
    if isinstance(files, StoredWeights):
        return files.rows(key, begin, begin + _ROWS)
    return files[key][begin : begin + _ROWS]
