"""RWKV-7 as a native ``.pth`` file, and as a folder in the layout of fla-hub.

Both hold all tensors in one dtype. A ``.pth`` has nothing but tensors: its epsilons are those of
every published model, and its texts begin and end with id 0. In fla's layout the epsilon of the
group norm is that of the other norms times the head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from model.checkpoint import Checkpoint, CheckpointError, save_tokenizer
from model.export.hf_folder import of_dtype, write_folder
from model.export.rwkv7_tensors import config_of, published, refuse_others
from model.families.rwkv7.config import Rwkv7Config
from model.families.rwkv7.read import FLA, NATIVE
from model.families.rwkv7.tuned import time_states
from model.state import StateLayout

GROUP_NORM_EPS, NORM_EPS = 64e-5, 1e-5


def write_pth(path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The native file, and the tokenizer's next to it. A tuned state stays merged, in float32.

    Raises `CheckpointError` where the file cannot say what the model computes.
    """
    config = config_of(checkpoint)
    refuse_others(".pth", "norm_eps", NORM_EPS, config.norm_eps)
    refuse_others(".pth", "group_norm_eps", GROUP_NORM_EPS, config.group_norm_eps)
    refuse_others(".pth", "bos_token_id", 0, config.bos_token_id)
    refuse_others(".pth", "eos_token_id", 0, config.eos_token_id)
    tokenizer = checkpoint.tokenizer
    companion = path.with_name(tokenizer.file_name)
    if companion.exists() and companion.read_text(encoding="utf-8") != tokenizer.content:
        raise CheckpointError(f"{companion} is another tokenizer than the model's")
    tensors = of_dtype(published(checkpoint, NATIVE), dtype)
    if checkpoint.tuned_state is not None:
        (*layers,) = StateLayout.of(config).views(checkpoint.tuned_state[None])
        states = time_states([{"S": layer["S"][0]} for layer in layers])
        tensors |= {key: torch.from_numpy(state) for key, state in states.items()}
    torch.save(tensors, path)
    save_tokenizer(path.parent, tokenizer)


def write_hf(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The folder: config, weights, the tokenizer's file and its settings.

    Raises `CheckpointError` where the config cannot say what the model computes.
    """
    config = config_of(checkpoint)
    wanted = config.norm_eps * config.head_dim
    refuse_others("fla's config", "group_norm_eps", wanted, config.group_norm_eps)
    tensors = published(checkpoint, FLA)
    write_folder(folder, checkpoint, _fla_config(config, dtype), tensors, dtype)


def _fla_config(config: Rwkv7Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "attn": None,
        "attn_mode": "chunk",
        "a_low_rank_dim": config.rate_rank,
        "bos_token_id": config.bos_token_id,
        "decay_low_rank_dim": config.decay_rank,
        "eos_token_id": config.eos_token_id,
        "fuse_norm": False,
        "gate_low_rank_dim": config.gate_rank,
        "head_dim": config.head_dim,
        "hidden_act": "sqrelu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "norm_bias": True,
        "norm_eps": config.norm_eps,
        "norm_first": True,
        "num_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "v_low_rank_dim": config.value_rank,
        "value_dim": [config.hidden_size] * config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }
