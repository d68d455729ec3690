"""Where each weight of a family with a bounded past is in the files of another project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from model.architectures.hybrid import BoundedConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.weights import Part, are_equal
from model.weights import CheckpointError, Weights


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
    other: Mapping[str, Part] = field(default_factory=dict)

    def parts_of(self, config: BoundedConfig) -> dict[str, Part]:
        """Of each weight that ``config`` lists."""
        parts: dict[str, Part] = {}
        mixers = self.mixers(config)
        for ours in config.weight_shapes():
            if ours in self.ends:
                parts[ours] = self.ends[ours]
                continue
            _, layer, name = ours.split(".", 2)
            mixer = mixers[int(layer)]
            part = self.both[name] if name in self.both else mixer[name.removeprefix("mixer.")]
            keys = tuple(f"{self.block.format(layer)}.{key}" for key in part.keys)
            parts[ours] = replace(part, keys=keys)
        return parts

    def mixers(self, config: BoundedConfig) -> list[Mapping[str, Part]]:
        """Those of each layer's mixer."""
        shapes = config.weight_shapes()
        attends = (
            f"blocks.{layer}.mixer.q.weight" in shapes for layer in range(config.num_hidden_layers)
        )
        return [self.attention if is_attention else self.other for is_attention in attends]


def weight(key: str, form: str = "same") -> Part:
    """The tensor ``key.weight``."""
    return Part((f"{key}.weight",), form)


def with_bias(keys: Mapping[str, str]) -> dict[str, Part]:
    """The weights and biases of linear maps, by our names of these."""
    kinds = ("weight", "bias")
    return {f"{o}.{k}": Part((f"{key}.{k}",)) for o, key in keys.items() for k in kinds}


def attention_layers(
    source: ForeignConfig, num_layers: int, kinds: tuple[str, str], interval: int
) -> tuple[int, ...]:
    """Indices of the layers of the second of ``kinds`` in ``layer_types``.

    Where there is no such field every ``interval``-th layer is one. Raises `ConfigError`.
    """
    usual = [kinds[(layer + 1) % interval == 0] for layer in range(num_layers)]
    found = layer_kinds(source, usual, kinds)
    return tuple(layer for layer, kind in enumerate(found) if kind == kinds[1])


def layer_kinds(source: ForeignConfig, usual: list[str], kinds: tuple[str, ...]) -> list[str]:
    """``layer_types``, of each layer one of ``kinds``; where there is no such field, ``usual``.

    Raises `ConfigError`.
    """
    found = source.anything("layer_types")
    if found is None:
        return usual
    if not isinstance(found, list) or any(kind not in kinds for kind in found):
        names = " and ".join(map(repr, kinds))
        raise ConfigError(
            f"{source.family}: layer_types must be a list of {names}, not {found!r:.200}"
        )
    if len(found) != len(usual):
        raise ConfigError(f"{source.family}: layer_types has {len(found)} of {len(usual)} layers")
    return found


def refuse_other_head(
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
