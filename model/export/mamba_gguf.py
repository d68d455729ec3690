"""Mamba-1, Falcon-Mamba and Mamba-2 in GGUF, with the keys and types of llama.cpp's converter.

Vectors, norms, convolutions and A stay float32; what remains is as asked, or float16 where its rows
do not divide into blocks. Tensors are written one at a time.
"""

from __future__ import annotations

import re
from pathlib import Path

from gguf import GGUFType, GGUFWriter

from model.checkpoint import Checkpoint, CheckpointError
from model.export.gguf_tensors import Planned, add_dtype, write_tensors
from model.export.gguf_vocabulary import add_vocabulary
from model.export.mamba_family import MambaFamily, config_of
from model.export.published import published
from model.export.rwkv7_tensors import refuse_others
from model.families.mamba.config import Mamba2Config
from model.families.mamba.read import GGUF
from model.tensor_spec import Shape

#: What llama.cpp's converter writes for a model whose context has no end.
CONTEXT_LENGTH = 1 << 20
_STAY_FLOAT32 = re.compile(r"_norm\.weight$|\.ssm_conv1d\.|\.ssm_[ad]$")


def write_gguf(path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The file, with the tokenizer and the chat template inside.

    Raises `CheckpointError` or `TokenizerError` where the format has no place for the model.
    """
    config = config_of(checkpoint)
    if config.inner_size != 2 * config.hidden_size:
        raise CheckpointError(
            f"GGUF implies an inner width of 2 * {config.hidden_size}, the model has"
            f" {config.inner_size}"
        )
    writer = GGUFWriter(path, "mamba2" if isinstance(config, Mamba2Config) else "mamba")
    _add_sizes(writer, config)
    add_dtype(writer, dtype)
    add_vocabulary(writer, checkpoint)

    def shape_of(name: str, shape: Shape) -> Shape:
        return _shape(config, name, shape)

    shapes = config.weight_shapes()
    planned, parts = [], GGUF.parts_of(config)
    for ours, part in parts.items():
        key = part.keys[0]
        stays = _STAY_FLOAT32.search(key) is not None
        planned.append(Planned(key, shape_of(ours, shapes[ours]), stays))
    write_tensors(
        writer, planned, published(checkpoint.weights, parts, shape_of), checkpoint, dtype
    )


def _add_sizes(writer: GGUFWriter, config: MambaFamily) -> None:
    writer.add_type(GGUFType.MODEL)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_size)
    writer.add_ssm_inner_size(config.inner_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if isinstance(config, Mamba2Config):
        writer.add_ssm_time_step_rank(config.num_attention_heads)
        writer.add_ssm_group_count(config.num_groups)
        return
    writer.add_ssm_time_step_rank(config.dt_rank)
    writer.add_ssm_dt_b_c_rms(config.mixer_norm)
    if config.mixer_norm:  # llama.cpp knows one epsilon
        refuse_others("GGUF", "mixer_norm_eps", config.norm_eps, config.mixer_norm_eps)


def _shape(config: MambaFamily, name: str, shape: Shape) -> Shape:
    """As the converter has it: vectors of a Mamba-2's heads as columns, its norm by groups."""
    if not isinstance(config, Mamba2Config):
        return shape
    if name.endswith((".A_log", ".D")):
        return (*shape, 1)
    if name.endswith(".mixer.norm.weight"):
        return (config.num_groups, shape[0] // config.num_groups)
    return shape
