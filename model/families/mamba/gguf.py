"""Mamba-1, Falcon-Mamba and Mamba-2 in GGUF, as llama.cpp's converter writes them.

A is stored in the place of its logarithm; files made before the converter was merged have A and D
of a Mamba-2 as vectors, not columns. The head may be a copy of the embedding. Falcon-Mamba's norms
inside the mixer have the epsilon of the other norms, as in llama.cpp: the file has no other.
"""

from __future__ import annotations

from typing import Any

from model.families.mamba.config import Mamba2Config, MambaConfig
from model.families.mamba.read import GGUF, is_embedding
from model.files import ConfigError
from model.foreign.gguf_source import BOS, EOS, GgufSource
from model.foreign.renamed import Renamed
from model.weights.gguf_file import GgufFile

#: What llama.cpp wants of every file, and these models do not have.
HARMLESS = ("context_length", "feed_forward_length", "attention.head_count")
HEAD = "output.weight"


def read_gguf(file: GgufFile, name: str) -> tuple[MambaConfig | Mamba2Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    family = str(file.metadata["general.architecture"])
    source = GgufSource(file, name, family)
    source.ignore(*HARMLESS)
    num_layers, size, width = source.sizes(file)
    both: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "state_size": source.integer("ssm.state_size"),
        "conv_size": source.integer("ssm.conv_kernel"),
        "norm_eps": source.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tied": HEAD not in file or is_embedding(file, GGUF),
        "bos_token_id": source.special_id(BOS, size),
        "eos_token_id": source.special_id(EOS, size),
    }
    config = (_mamba2 if family == "mamba2" else _mamba)(source, both)
    source.refuse_unknown()
    weights = Renamed(file, GGUF.parts_of(config))
    unused = {HEAD} if config.tied else set()
    weights.check(name, config.weight_shapes(), unused & set(file))
    return config, weights


def _mamba(source: GgufSource, both: dict[str, Any]) -> MambaConfig:
    is_normed = source.boolean("ssm.dt_b_c_rms", False)
    return MambaConfig(
        **both,
        inner_size=source.integer("ssm.inner_size"),
        dt_rank=source.integer("ssm.time_step_rank"),
        mixer_norm=is_normed,
        mixer_norm_eps=both["norm_eps"] if is_normed else 1e-6,
    )


def _mamba2(source: GgufSource, both: dict[str, Any]) -> Mamba2Config:
    inner, heads = source.integer("ssm.inner_size"), source.integer("ssm.time_step_rank")
    if inner % heads:
        raise ConfigError(
            f"{source.family}: ssm.time_step_rank must divide ssm.inner_size {inner}, not {heads}"
        )
    return Mamba2Config(
        **both,
        num_attention_heads=heads,
        head_dim=inner // heads,
        num_groups=source.integer("ssm.group_count", 1),
    )
