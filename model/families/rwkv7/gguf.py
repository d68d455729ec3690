"""RWKV-7 in GGUF, as llama.cpp's converter writes it.

Its low-rank matrices are Linear weights [out, in]. The token shift of the time mix is one tensor
[6, 1, 1, D] in the order r, w, k, v, a, g, and ``r_k`` is [D]. The first layer has no values to
mix in: its ``time_mix_v*`` are copies of ``time_mix_a*``, and are not read.
"""

from __future__ import annotations

import math
from dataclasses import replace

from model.families.rwkv7.config import Rwkv7Config
from model.families.rwkv7.read import GGUF, renamed, sizes
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.renamed import Renamed
from model.tensor_spec import Shape
from model.weights import Array, CheckpointError, WrappedWeights
from model.weights.gguf_file import GgufFile

#: llama.cpp computes with this epsilon for every head size.
GROUP_NORM_EPS = 64e-5
#: What the file says of training, or of kernels.
HARMLESS = ("context_length", "attention.head_count", "attention.head_count_kv")

#: The ids that texts begin and end with.
BOS, EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"


def metadata_of(file: GgufFile, name: str, prefix: str) -> ForeignConfig:
    """The fields that begin with ``prefix``, and the ids that texts begin and end with."""
    values = {key: value for key, value in file.metadata.items() if key.startswith(prefix)}
    ends = {key: file.metadata.get(key, 0) for key in (BOS, EOS)}
    short = {key: v[:80] if isinstance(v, str) else v for key, v in (values | ends).items()}
    return ForeignConfig({"model_type": name, **short})


def read_gguf(file: GgufFile, name: str) -> tuple[Rwkv7Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    prefix = "rwkv7."
    source = metadata_of(file, name, prefix)
    source.ignore(*(prefix + field for field in HARMLESS))
    source.choice(f"{prefix}token_shift_count", 2)
    source.choice(f"{prefix}rescale_every_n_layers", 0)
    tensors = TimeMixTensors(file, name, source.integer(f"{prefix}wkv.head_size"))
    config = sizes(tensors, name, GGUF)
    _check(source, prefix, config)
    config = replace(
        config,
        norm_eps=source.number(f"{prefix}attention.layer_norm_epsilon", 1e-5),
        group_norm_eps=GROUP_NORM_EPS,
        bos_token_id=source.special_id(BOS, config.vocab_size),
        eos_token_id=source.special_id(EOS, config.vocab_size),
    )
    source.refuse_unknown()
    return config, renamed(tensors, name, config, GGUF)


def _check(source: ForeignConfig, prefix: str, config: Rwkv7Config) -> None:
    """Raises `ConfigError` where the metadata says another size than the tensors have."""
    wanted = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.decay_lora_rank": config.decay_rank,
        "attention.iclr_lora_rank": config.rate_rank,
        "attention.value_residual_mix_lora_rank": config.value_rank,
        "attention.gate_lora_rank": config.gate_rank,
    }
    if config.num_hidden_layers == 1:
        source.ignore(prefix + "attention.value_residual_mix_lora_rank")
        del wanted["attention.value_residual_mix_lora_rank"]
    for field, size in wanted.items():
        agree(source, prefix + field, source.integer(prefix + field), size)
    size = config.vocab_size
    agree(source, f"{prefix}vocab_size", source.integer(f"{prefix}vocab_size", size), size)


def agree(source: ForeignConfig, key: str, found: int, size: int) -> None:
    """Raises `ConfigError` where the metadata say another size than the tensors have."""
    if found != size:
        raise ConfigError(f"{source.family}: {key} is {found}, the tensors have {size}")


class TimeMixTensors(WrappedWeights):
    """The tensors without axes of one beyond the second, and ``r_k`` as [heads, features]."""

    def __init__(self, file: GgufFile, file_name: str, head_dim: int) -> None:
        super().__init__(file)
        self._file_name, self._head_dim = file_name, head_dim

    def __getitem__(self, name: str) -> Array:
        return self._base[name].reshape(self.shape(name))

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        if self.shape(name) == self._base.shape(name):
            return self._base.rows(name, begin, end)
        return self[name][begin:end]

    def block_kind(self, name: str) -> str | None:
        is_same = self.shape(name) == self._base.shape(name)
        return self._base.block_kind(name) if is_same else None

    def shape(self, name: str) -> Shape:
        shape = self._base.shape(name)
        if len(shape) > 2:
            shape = tuple(size for size in shape if size > 1) or (1,)
        if not name.endswith(".time_mix_r_k.weight"):
            return shape
        if math.prod(shape) % self._head_dim:
            raise CheckpointError(
                f"{self._file_name}: {name} is {list(shape)}, no heads of {self._head_dim}"
            )
        return (math.prod(shape) // self._head_dim, self._head_dim)
