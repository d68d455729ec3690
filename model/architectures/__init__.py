"""What a model family is to the engine, the store and the API, and what families share.

An architecture is a config and a network.

- The **config** (`model.architectures.config.Config`) is known without torch and without
  weights. It is validated, has a JSON form with a ``model_type`` of its own, names the
  tensors of a session's state layer by layer (all zeros is the empty state), and gives the
  names and shapes of the weights.
- The **network** (`model.architectures.network.Network`) maps token ids to logits in the
  three forms ``parallel``, ``chunk`` and ``step``, with the state as named tensors per layer.

`model.state.StateLayout` puts the state of any config into one block of bytes, which is all
that sessions, forks, snapshots and stores handle. A new family costs a folder in `model.families`,
with the readers of its published files, a line in `ARCHITECTURES` and one in `model.foreign`; a
writer is added to `model.export`.

Importing this imports no torch; `model.architectures.network` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from model.architectures.config import QUANTIZATION, Config, calibration_of
from model.files import ConfigError

__all__ = [
    "ARCHITECTURES",
    "Config",
    "config_class",
    "config_from_dict",
    "load_class",
]


class Architecture(NamedTuple):
    """The classes of a family, each as (module, name); imported when asked for.

    ``name`` is what users call the family, ``chat`` a `model.checkpoint.FamilyChat`, where
    the family has taught its models turns, ``native`` a function of `model.native.options`, where
    the native runtime has kernels for it.
    """

    name: str
    config: tuple[str, str]
    network: tuple[str, str]
    chat: tuple[str, str] | None = None
    native: tuple[str, str] | None = None


#: ``model_type`` of our own checkpoint folders -> the family.
ARCHITECTURES: dict[str, Architecture] = {
    "everstream": Architecture(
        name="everstream",
        config=("model.config", "ModelConfig"),
        network=("model.lm", "LanguageModel"),
        native=("model.native.options", "block_options"),
    ),
    "everstream-rwkv7": Architecture(
        name="rwkv7",
        config=("model.families.rwkv7.config", "Rwkv7Config"),
        network=("model.families.rwkv7.network", "Rwkv7"),
        chat=("model.families.rwkv7.chat", "world_chat"),
        native=("model.native.options", "rwkv7_options"),
    ),
    "everstream-qwen35": Architecture(
        name="qwen35",
        config=("model.families.qwen35.config", "Qwen35Config"),
        network=("model.families.qwen35.network", "Qwen35"),
        chat=("model.families.qwen35.chat", "qwen35_chat"),
        native=("model.native.options", "qwen35_options"),
    ),
    "everstream-lfm2": Architecture(
        name="lfm2",
        config=("model.families.lfm2.config", "Lfm2Config"),
        network=("model.families.lfm2.network", "Lfm2"),
        chat=("model.families.lfm2.chat", "lfm2_chat"),
        native=("model.native.options", "lfm2_options"),
    ),
    "everstream-lfm3": Architecture(
        name="lfm3",
        config=("model.families.lfm3.config", "Lfm3Config"),
        network=("model.families.lfm3.network", "Lfm3"),
        chat=("model.families.lfm2.chat", "lfm2_chat"),
        native=("model.native.options", "lfm3_options"),
    ),
    "everstream-llama": Architecture(
        name="llama",
        config=("model.families.llama.config", "LlamaConfig"),
        network=("model.families.llama.network", "Llama"),
        native=("model.native.options", "llama_options"),
    ),
    "everstream-mamba": Architecture(
        name="mamba",
        config=("model.families.mamba.config", "MambaConfig"),
        network=("model.families.mamba.network", "Mamba"),
        native=("model.native.options", "mamba_options"),
    ),
    "everstream-mamba2": Architecture(
        name="mamba2",
        config=("model.families.mamba.config", "Mamba2Config"),
        network=("model.families.mamba.network", "Mamba2"),
        native=("model.native.options", "mamba2_options"),
    ),
    "everstream-mamba2-hybrid": Architecture(
        name="mamba2_hybrid",
        config=("model.families.mamba2_hybrid.config", "Mamba2HybridConfig"),
        network=("model.families.mamba2_hybrid.network", "Mamba2Hybrid"),
        native=("model.native.options", "mamba2_hybrid_options"),
    ),
    "everstream-jamba": Architecture(
        name="jamba",
        config=("model.families.jamba.config", "JambaConfig"),
        network=("model.families.jamba.network", "Jamba"),
        native=("model.native.options", "jamba_options"),
    ),
    "everstream-arwkv7": Architecture(
        name="arwkv7",
        config=("model.families.rwkv7.config", "Arwkv7Config"),
        network=("model.families.rwkv7.network", "Arwkv7"),
        chat=("model.families.rwkv7.chat", "qwen_chat"),
        native=("model.native.options", "arwkv7_options"),
    ),
}


def config_from_dict(values: dict[str, Any]) -> Config:
    """The config in a ``config.json`` of ours; raises `ConfigError` for any other.

    What it says of its weights (`model.architectures.config`) is checked and left out.
    """
    calibration_of(values)
    values = {name: value for name, value in values.items() if name != QUANTIZATION}
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = " or ".join(map(repr, ARCHITECTURES))
        raise ConfigError(f"model_type must be {known}, not {model_type!r}")
    config: Config = load_class(ARCHITECTURES[model_type].config).from_dict(values)
    return config


def config_class(name: str) -> type[Config]:
    """The config of the family that users call ``name``; raises `ConfigError` for another name."""
    families = {family.name: family for family in ARCHITECTURES.values()}
    if name not in families:
        raise ConfigError(f"architecture must be {' or '.join(families)}, not {name!r}")
    cls: type[Config] = load_class(families[name].config)
    return cls


def load_class(place: tuple[str, str]) -> Any:
    """The class of an `Architecture`; imports its module."""
    module, name = place
    return getattr(import_module(module), name)
