"""Mamba-1, Falcon-Mamba and Mamba-2 as folders that `transformers` reads, and in GGUF.

GGUF has the keys and types of llama.cpp's converter: vectors, norms, convolutions and A stay
float32.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gguf import GGUFType, GGUFWriter

from model.checkpoint import Checkpoint, CheckpointError
from model.export.published import (
    Planned,
    add_dtype,
    add_vocabulary,
    published,
    refuse_others,
    with_middle_axis,
    write_folder,
    write_tensors,
)
from model.families.mamba.config import Mamba2Config, MambaConfig
from model.families.mamba.read import GGUF, folder_names
from model.tensor_spec import Shape

MambaFamily = MambaConfig | Mamba2Config


def config_of(checkpoint: Checkpoint) -> MambaFamily:
    """The config, which is of one of the two families."""
    assert isinstance(checkpoint.config, MambaFamily), checkpoint.config
    return checkpoint.config


def write_hf(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The folder. Raises `CheckpointError` where the config cannot say what the model computes."""
    config = config_of(checkpoint)
    parts = folder_names(()).parts_of(config)
    tensors = published(checkpoint.weights, parts, with_middle_axis)
    write_folder(folder, checkpoint, _config(config, dtype), tensors, dtype)


def _config(config: MambaFamily, dtype: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "conv_kernel": config.conv_size,
        "eos_token_id": config.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "layer_norm_epsilon": config.norm_eps,
        "num_hidden_layers": config.num_hidden_layers,
        "pad_token_id": config.eos_token_id,
        "state_size": config.state_size,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": config.vocab_size,
    }
    if isinstance(config, Mamba2Config):
        if config.inner_size % config.hidden_size:
            raise CheckpointError(
                f"the config has no place for an inner width of {config.inner_size}, which is not"
                f" a multiple of {config.hidden_size}"
            )
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            **values,
            "expand": config.inner_size // config.hidden_size,
            "head_dim": config.head_dim,
            "n_groups": config.num_groups,
            "num_heads": config.num_attention_heads,
        }
    values |= {"intermediate_size": config.inner_size, "time_step_rank": config.dt_rank}
    if config.mixer_norm:
        name, kind = "FalconMambaForCausalLM", "falcon_mamba"
        values["mixer_rms_eps"] = config.mixer_norm_eps
    else:
        name, kind = "MambaForCausalLM", "mamba"
    return {"architectures": [name], "model_type": kind, **values}


#: What llama.cpp's converter writes for a model whose context has no end.
CONTEXT_LENGTH = 1 << 20
#: The keys of tensors of a mixer that stay float32, besides vectors.
STAY_FLOAT32 = re.compile(r"_norm\.weight$|\.ssm_conv1d\.|\.ssm_[ad]$")


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
        return gguf_shape(config, name, shape)

    shapes = config.weight_shapes()
    planned, parts = [], GGUF.parts_of(config)
    for ours, part in parts.items():
        key = part.keys[0]
        stays = STAY_FLOAT32.search(key) is not None
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
    writer.add_layer_norm_rms_eps(config.norm_eps)
    add_mixer_sizes(writer, config)
    if isinstance(config, Mamba2Config):
        return
    writer.add_ssm_dt_b_c_rms(config.mixer_norm)
    if config.mixer_norm:  # llama.cpp knows one epsilon
        refuse_others("GGUF", "mixer_norm_eps", config.norm_eps, config.mixer_norm_eps)


def add_mixer_sizes(writer: GGUFWriter, config: MambaFamily) -> None:
    """Adds the sizes of a mixer, which hybrids have too."""
    writer.add_ssm_conv_kernel(config.conv_size)
    writer.add_ssm_inner_size(config.inner_size)
    writer.add_ssm_state_size(config.state_size)
    if isinstance(config, Mamba2Config):
        writer.add_ssm_time_step_rank(config.num_attention_heads)
        writer.add_ssm_group_count(config.num_groups)
    else:
        writer.add_ssm_time_step_rank(config.dt_rank)


def gguf_shape(config: MambaFamily, name: str, shape: Shape) -> Shape:
    """As the converter has it: vectors of a Mamba-2's heads as columns, its norm by groups.

    ``name`` is ours, of a Mamba or of a hybrid whose mixers have this ``config``.
    """
    if not isinstance(config, Mamba2Config):
        return shape
    if name.endswith((".A_log", ".D")):
        return (*shape, 1)
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        return (config.num_groups, shape[0] // config.num_groups)
    return shape
