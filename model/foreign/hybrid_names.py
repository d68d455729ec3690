"""Where each weight of a hybrid is in the files of another project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from model.architectures.hybrid import HybridConfig
from model.foreign.renamed import Part


@dataclass(frozen=True)
class HybridNames:
    """The parts of one kind of file by our names, those in a block without the block's.

    ``block`` is theirs, with ``{}`` for the layer. ``attention`` and ``other`` are the mixers of
    the two kinds of layers.
    """

    ends: Mapping[str, Part]
    block: str
    both: Mapping[str, Part]
    attention: Mapping[str, Part]
    other: Mapping[str, Part]

    def parts_of(self, config: HybridConfig) -> dict[str, Part]:
        """Of each weight that ``config`` lists."""
        parts: dict[str, Part] = {}
        for ours in config.weight_shapes():
            if ours in self.ends:
                parts[ours] = self.ends[ours]
                continue
            _, layer, name = ours.split(".", 2)
            mixer = self.attention if config.is_attention[int(layer)] else self.other
            part = self.both[name] if name in self.both else mixer[name.removeprefix("mixer.")]
            keys = tuple(f"{self.block.format(layer)}.{key}" for key in part.keys)
            parts[ours] = Part(keys, part.form)
        return parts


def weight(key: str, form: str = "same") -> Part:
    """The tensor ``key.weight``."""
    return Part((f"{key}.weight",), form)
