"""Mamba models drawn at random: ours, the same one in `transformers`, and files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from model.families.mamba.config import Mamba2Config, MambaConfig
from tests.model.tokenization.files import sentencepiece_file

Weights = dict[str, npt.NDArray[np.float32]]
Published = dict[str, Tensor]

Config = MambaConfig | Mamba2Config

#: "head" has the sizes of a published head, "grouped" two groups and a head of its own; "first" is
#: a Mamba-1, and "falcon" one with norms in the mixer.
SHAPES: dict[str, Config] = {
    "odd": Mamba2Config(310, 23, 3, num_attention_heads=2, head_dim=23, state_size=13, conv_size=3),
    "head": Mamba2Config(310, 64, 2, num_attention_heads=2, head_dim=64, state_size=128),
    "grouped": Mamba2Config(
        310, 32, 4, num_attention_heads=8, head_dim=8, state_size=16, num_groups=2, tied=False
    ),
    "first": MambaConfig(310, 64, 2, inner_size=128, dt_rank=4),
    "falcon": MambaConfig(
        *(310, 23, 3),
        inner_size=46,
        state_size=7,
        conv_size=3,
        dt_rank=5,
        mixer_norm=True,
        tied=False,
    ),
}

#: Our names -> those of `transformers`, outside of the blocks and in one.
ENDS = {
    "embedding.weight": "backbone.embeddings.weight",
    "norm.weight": "backbone.norm_f.weight",
    "head.weight": "lm_head.weight",
}
IN_BLOCK = {
    "mixer_norm.weight": "norm.weight",
    "mixer.in.weight": "mixer.in_proj.weight",
    "mixer.conv": "mixer.conv1d.weight",
    "mixer.conv_bias": "mixer.conv1d.bias",
    "mixer.x.weight": "mixer.x_proj.weight",
    "mixer.dt.weight": "mixer.dt_proj.weight",
    "mixer.dt.bias": "mixer.dt_proj.bias",
    "mixer.out.weight": "mixer.out_proj.weight",
}


@cache
def drawn(name: str, seed: int = 0) -> Weights:
    """Weights for `SHAPES`."""
    return drawn_for(SHAPES[name], seed)


def drawn_for(config: Config, seed: int = 0) -> Weights:
    """Weights of every kind for ``config``, none zero, with the decays of a trained model."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for key, shape in config.weight_shapes().items():
        noise = torch.randn(shape, generator=generator)
        if key.endswith("A_log"):
            tensor = (1 + 15 * torch.rand(shape, generator=generator)).log()
        elif key.endswith(("dt_bias", "dt.bias")):
            tensor = -4 + noise
        elif key.endswith(("norm.weight", ".D")):
            tensor = 1 + 0.2 * noise
        elif key == "embedding.weight" or key.endswith("conv_bias"):
            tensor = 0.5 * noise
        else:
            tensor = noise * shape[-1] ** -0.5
        weights[key] = tensor.numpy()
    return weights


def published(weights: Weights) -> Published:
    """``weights`` by the names, and with the axes, of `transformers`."""
    found: Published = {}
    for name, array in weights.items():
        tensor = torch.from_numpy(array.copy())
        if name in ENDS:
            found[ENDS[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        if rest == "mixer.conv":
            tensor = tensor.unsqueeze(1)
        found[f"backbone.layers.{layer}.{IN_BLOCK.get(rest, rest)}"] = tensor
    return found


def settings_of(config: Config) -> PreTrainedConfig:
    """The config in `transformers`."""
    both: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "state_size": config.state_size,
        "conv_kernel": config.conv_size,
        "expand": config.inner_size // config.hidden_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": 0,
        "layer_norm_epsilon": config.norm_eps,
    }
    if isinstance(config, Mamba2Config):
        heads = {"num_heads": config.num_attention_heads, "head_dim": config.head_dim}
        more = {"n_groups": config.num_groups, "chunk_size": 16}
        return transformers.Mamba2Config(**both, **heads, **more)
    both |= {"intermediate_size": config.inner_size, "time_step_rank": config.dt_rank}
    if config.mixer_norm:
        return transformers.FalconMambaConfig(**both, mixer_rms_eps=config.mixer_norm_eps)
    return transformers.MambaConfig(**both)


def theirs_of(config: Config, weights: Weights) -> PreTrainedModel:
    """The model in `transformers`, in evaluation mode and frozen."""
    model = transformers.AutoModelForCausalLM.from_config(settings_of(config))
    missing, unknown = model.load_state_dict(published(weights), strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    model.tie_weights()
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


@cache
def theirs(name: str) -> PreTrainedModel:
    """Of `drawn`."""
    return theirs_of(SHAPES[name], drawn(name))


def own_names(weights: Published) -> Published:
    """As state-spaces' files have them, in which a tied head is there too."""
    renamed = {key.replace("embeddings", "embedding"): t for key, t in weights.items()}
    renamed.setdefault("lm_head.weight", renamed["backbone.embedding.weight"])
    return renamed


#: What Codestral's `params.json` says, and what state-spaces' package adds to it.
CODESTRAL = Mamba2Config(
    *(409, 64, 2),
    num_attention_heads=2,
    head_dim=64,
    state_size=128,
    num_groups=2,
    tied=False,
    bos_token_id=1,
    eos_token_id=2,
)


def write_mistral(folder: Path, **change: Any) -> tuple[Path, PreTrainedModel]:
    """A folder as `mistral_inference` reads it, and the same model in `transformers`."""
    model = theirs_of(CODESTRAL, drawn_for(CODESTRAL))
    names = own_names(published(drawn_for(CODESTRAL)))
    folder.mkdir()
    save_file(
        {f"model.{key}": tensor.contiguous() for key, tensor in names.items()},
        folder / "consolidated.safetensors",
    )
    params = {
        "dim": 64,
        "n_layers": 2,
        "vocab_size": 409,
        "n_groups": 2,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": False,
        "model_type": "mamba",
    } | change
    (folder / "params.json").write_text(json.dumps(params), encoding="utf-8")
    (folder / "tokenizer.model.v3").write_bytes(sentencepiece_file())
    return folder, model
