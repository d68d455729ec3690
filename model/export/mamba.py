"""Mamba-1, Falcon-Mamba and Mamba-2 as folders that `transformers` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model.checkpoint import Checkpoint, CheckpointError
from model.export.hf_folder import write_folder
from model.export.mamba_family import MambaFamily, config_of
from model.export.published import published, with_middle_axis
from model.families.mamba.config import Mamba2Config
from model.families.mamba.read import folder_names


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
