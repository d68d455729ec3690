"""What the readers of GGUF files share: the metadata of a model, and rows in the original order.

The metadata have the checks of `ForeignConfig` (`GgufSource`). In files of some families the rows
of a head of q and k lie in pairs that turn together (`PairedRows`): row ``2 i + s`` is row
``s F / 2 + i`` of the original, for F rows of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from model.architectures.hybrid import BoundedConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.weights import Array, CheckpointError, WrappedWeights
from model.weights.gguf_file import GgufFile

EMBEDDING = "token_embd.weight"
#: The ids that texts begin and end with, and that fills up batches.
BOS, EOS, PAD = (f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "padding"))


class GgufSource(ForeignConfig):
    """The keys of ``family`` in a file called ``name``, without the family, and `BOS` and `EOS`.

    A file without a start of text begins with what separates texts: the padding, or the end.
    """

    def __init__(self, file: GgufFile, name: str, family: str) -> None:
        prefix = f"{family}."
        values: dict[str, Any] = {"model_type": name}
        for key, value in (*file.metadata.items(), *file.arrays.items()):
            if key.startswith(prefix):
                short = value[:80] if isinstance(value, str) else value
                values[key.removeprefix(prefix)] = short
        end = file.metadata.get(EOS, 0)
        values[EOS] = end
        values[BOS] = file.metadata.get(BOS, file.metadata.get(PAD, end))
        super().__init__(values, file)

    def per_layer(self, name: str, num_layers: int) -> list[int]:
        """A field that is a number for all layers or an array with one for each, or for more."""
        value = self.anything(name)
        if type(value) in (int, bool):
            return [int(value)] * num_layers
        numbers = [int(each) for each in value[:num_layers]] if hasattr(value, "dtype") else []
        if len(numbers) < num_layers or any(number < 0 for number in numbers):
            raise ConfigError(
                f"{self.family}: {name} must be a number or one for each of {num_layers} layers,"
                f" not {value!r:.80}"
            )
        return numbers

    def sizes(self, file: GgufFile) -> tuple[int, int, int]:
        """Blocks, ids and width. Raises `ConfigError` or `CheckpointError`."""
        num_blocks = self.num_layers("block_count")
        shape = file.shape(EMBEDDING) if EMBEDDING in file else ()
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{self.family}: {EMBEDDING} is missing, or no matrix")
        vocab_size, width = shape
        self.agree("vocab_size", vocab_size)
        self.agree("embedding_length", width)
        return num_blocks, vocab_size, width

    def decoder(
        self,
        file: GgufFile,
        *,
        all_attention: bool = False,
        theta: float | None = 1e4,
        eps: float = 1e-5,
    ) -> dict[str, Any]:
        """The fields of a `BoundedConfig` that files of most families say in the same way.

        ``theta`` and ``eps`` are defaults; None where nothing turns, and a field for it is unknown.
        Raises `ConfigError` or `CheckpointError`, also where some layers are no attention and
        ``all_attention`` says that all are.
        """
        num_layers, size, width = self.sizes(file)
        kv_heads = self.per_layer("attention.head_count_kv", num_layers)
        layers = tuple(layer for layer, heads in enumerate(kv_heads) if heads)
        if all_attention and len(layers) < num_layers:
            raise ConfigError(f"{self.family}: attention.head_count_kv must not be 0 in any layer")
        heads = self.integer("attention.head_count")
        head_dim = self.integer("attention.key_length", width // heads)
        self.agree("attention.value_length", head_dim)
        rotary = {} if theta is None else {"rope_theta": self.number("rope.freq_base", theta)}
        return {
            **rotary,
            "vocab_size": size,
            "hidden_size": width,
            "num_hidden_layers": num_layers,
            "attention_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_kv_heads(kv_heads, layers),
            "head_dim": head_dim,
            "norm_eps": self.number("attention.layer_norm_rms_epsilon", eps),
            "tied": "output.weight" not in file,
            "bos_token_id": self.special_id(BOS, size),
            "eos_token_id": self.special_id(EOS, size),
            "max_context": self.integer("context_length"),
        }

    def num_kv_heads(self, heads: list[int], attention_layers: tuple[int, ...]) -> int:
        """That of all layers of attention. ``heads`` has one number for each layer."""
        found = {heads[layer] for layer in attention_layers} or {1}
        if len(found) > 1 or 0 in found:
            raise ConfigError(
                f"{self.family}: attention.head_count_kv differs among layers of attention"
            )
        return found.pop()

    def agree(self, name: str, size: int) -> None:
        """Raises `ConfigError` where a field is there and is not what the tensors have."""
        found = self.integer(name, size)
        if found != size:
            raise ConfigError(f"{self.family}: {name} is {found}, the tensors have {size}")


#: Rows of a tensor, from one to before another.
_Read = Callable[[str, int, int | None], Array]


class PairedRows(WrappedWeights):
    """The tensors with the rows of q and k in the order of the original."""

    def __init__(self, file: GgufFile, config: BoundedConfig) -> None:
        super().__init__(file)
        half = config.head_dim // 2
        pairs = np.arange(2 * half).reshape(half, 2).T.ravel()
        self._orders: Mapping[str, npt.NDArray[Any]] = {
            f"attn_{name}": (np.arange(num)[:, None] * config.head_dim + pairs).ravel()
            for name, num in (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
        }

    def __getitem__(self, name: str) -> Array:
        order = self._order_of(name)
        tensor = self._base[name]
        return tensor if order is None else tensor[order]

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`."""
        return self._in_order(self._base.rows, name, begin, end)

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`; a row's numbers stay in their order."""
        return self._in_order(self._base.blocks, name, begin, end)

    def block_kind(self, name: str) -> str | None:
        return self._base.block_kind(name)

    def _order_of(self, name: str) -> npt.NDArray[Any] | None:
        return self._orders.get(name.split(".")[2]) if name.startswith("blk.") else None

    def _in_order(self, read: _Read, name: str, begin: int, end: int | None) -> Array:
        """The rows of the heads around them are read, and of these those that are asked for."""
        order = self._order_of(name)
        if order is None:
            return read(name, begin, end)
        order = order[begin:end]
        if not len(order):
            return read(name, 0, 0)
        first = int(order.min())
        rows: Array = read(name, first, int(order.max()) + 1)[order - first]
        return rows
