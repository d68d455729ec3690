"""What a GGUF file says of its family's model, with the checks of `ForeignConfig`."""

from __future__ import annotations

from typing import Any

from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.weights import CheckpointError
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
