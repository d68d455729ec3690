"""Checkpoints that others trained, read as models of ours: which reader reads what.

A reader takes the values of ``config.json`` and the tensors of the weight
files. It checks both strictly: what a config asks that we do not do, and a key
that is missing or unknown, is an error that names it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from model.architectures import ARCHITECTURES, load_class
from model.architectures.config import Config
from model.checkpoint_files import PARAMS, config_file
from model.files import ConfigError, read_json
from model.foreign.config import ForeignConfig
from model.foreign.weights import Weights
from model.weights import Array, StoredWeights
from model.weights.gguf_file import GgufFile

Reader = Callable[[ForeignConfig, Weights], tuple[Config, Mapping[str, Array]]]

#: Why hybrids are refused, and transformers.
GROWS = "some of its layers are attention, whose state grows with the text"
ALL_GROW = "its layers are attention, whose state grows with the text"
#: What to take instead.
SERVED = ", ".join(family.name for family in ARCHITECTURES.values() if family.name != "everstream")
INSTEAD = f"docs/start/models.md has what is served ({SERVED}), docs/contribute/convert.md the rest"

#: The name here of folders of state-spaces' own, whose ``config.json`` has no ``model_type``.
STATE_SPACES = "mamba_ssm"
#: The same of Mistral's own folders with a Mamba-2, whose ``params.json`` says "mamba".
MISTRAL = "mistral_mamba"
#: The start of a text in all of Mistral's vocabularies; their configs do not say it.
MISTRAL_BOS = 1

#: ``model_type`` of config.json -> (module, function). Imported when asked for.
READERS: dict[str, tuple[str, str]] = {
    "gpt2": ("model.foreign.gpt2", "read_gpt2"),
    **{
        name: ("model.families.llama.read", f"read_{name}")
        for name in ("llama", "qwen2", "qwen3", "smollm3")
    },
    "gla": ("model.foreign.flash_linear_attention", "read_gla"),
    "retnet": ("model.foreign.flash_linear_attention", "read_retnet"),
    "linear_attn": ("model.foreign.flash_linear_attention", "read_linear_attn"),
    "gated_deltanet": ("model.foreign.flash_linear_attention", "read_gated_deltanet"),
    "delta_net": ("model.foreign.flash_linear_attention", "read_delta_net"),
    "rwkv7": ("model.families.rwkv7.read", "read_rwkv7"),
    "rwkv7_native": ("model.families.rwkv7.read", "read_rwkv7"),
    "rwkv7_hf_adapter": ("model.families.rwkv7.read", "read_rwkv7"),
    "rwkv_hybrid": ("model.families.rwkv7.read_arwkv", "read_arwkv7"),
    "rwkv": ("model.families.rwkv7.read", "read_rwkv7"),  # if `refuse_config` lets it pass
    "qwen3_5": ("model.families.qwen35.read", "read_qwen35"),
    "qwen3_5_text": ("model.families.qwen35.read", "read_qwen35"),
    "lfm2": ("model.families.lfm2.read", "read_lfm2"),
    "granite": ("model.families.mamba2_hybrid.read", "read_granite"),
    "granitemoehybrid": ("model.families.mamba2_hybrid.read", "read_granite_hybrid"),
    "nemotron_h": ("model.families.mamba2_hybrid.read", "read_nemotron"),
    "falcon_h1": ("model.families.mamba2_hybrid.read", "read_falcon_h1"),
    "jamba": ("model.families.jamba.read", "read_jamba"),
    "lfm3": ("model.families.lfm3.read", "read_lfm3"),
    "mamba": ("model.families.mamba.read", "read_mamba"),
    "falcon_mamba": ("model.families.mamba.read", "read_mamba"),
    "mamba2": ("model.families.mamba.read", "read_mamba2"),
    STATE_SPACES: ("model.families.mamba.read", "read_state_spaces"),
    MISTRAL: ("model.families.mamba.read", "read_mistral"),
}

#: The same where a family has multi-token heads: of folders, and of GGUF.
HEAD_READERS = dict.fromkeys(
    ("qwen3_5", "qwen3_5_text"), ("model.families.qwen35.read", "read_mtp")
)
GGUF_HEAD_READERS = {"qwen35": ("model.families.qwen35.read", "read_gguf_mtp")}

#: The functions that look at no tensor's numbers but those of a head that is also the embedding.
_BY_SHAPES = (
    *("read_rwkv7", "read_arwkv7", "read_qwen35", "read_lfm2", "read_lfm3"),
    *("read_granite", "read_granite_hybrid", "read_nemotron", "read_falcon_h1", "read_jamba"),
    *("read_llama", "read_qwen2", "read_qwen3", "read_smollm3"),
    *("read_mamba", "read_mamba2", "read_state_spaces", "read_mistral"),
)

#: ``general.architecture`` of GGUF -> (module, function).
GGUF_READERS = {
    "rwkv7": ("model.families.rwkv7.read", "read_gguf"),
    "arwkv7": ("model.families.rwkv7.read_arwkv", "read_gguf"),
    "qwen35": ("model.families.qwen35.read", "read_gguf"),
    "lfm2": ("model.families.lfm2.read", "read_gguf"),
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "smollm3"), ("model.families.llama.read", "read_gguf")
    ),
    **dict.fromkeys(
        ("granite", "granitehybrid", "nemotron_h", "falcon-h1"),
        ("model.families.mamba2_hybrid.read", "read_gguf"),
    ),
    "jamba": ("model.families.jamba.read", "read_gguf"),
    "mamba": ("model.families.mamba.read", "read_gguf"),
    "mamba2": ("model.families.mamba.read", "read_gguf"),
}
#: Those whose attention has a bounded past.
WITH_ATTENTION = (
    *("qwen35", "lfm2", "llama", "qwen2", "qwen3", "smollm3"),
    *("granite", "granitehybrid", "nemotron_h", "falcon-h1", "jamba"),
)

#: Families that people will try, by why they cannot be served: their names in config.json and GGUF.
REFUSED: dict[str, tuple[str, ...]] = {
    GROWS: (
        *("qwen3_next", "kimi_linear", "minimax", "minimax_text_01", "bamba"),
        *("plamo2", "zamba", "zamba2"),
        *("qwen3next", "kimi-linear", "kimi-k3", "minimax-01"),
    ),
    "only the dense ones of this family are": (
        *("qwen3_5_moe", "qwen3_5_moe_text", "qwen35moe", "lfm2_moe", "lfm2moe"),
        *("nemotron_h_moe", "granitemoe", "granitemoeshared"),
    ),
    "of this family only LFM2, LFM2.5 and LFM3 that are dense and read text are": (
        *("lfm2_vl", "lfm2-vl", "lfm2_audio", "lfm3_moe"),
    ),
    "of this family only RWKV-7 is": ("rwkv4", "rwkv5", "rwkv6"),
    "its keys are what its forget gates leave, which no mechanism here computes": (
        *("hgrn", "hgrn2"),
    ),
    "of fla, gla, retnet, linear_attn, gated_deltanet, delta_net and rwkv7 are": (
        *("kda", "gsa", "abc", "lightnet", "comba", "gated_deltaproduct", "mesa_net", "rodimus"),
    ),
}
#: Models that others made of transformers, by a part of their names; some have attention layers.
OTHER_HYBRIDS = re.compile(r"^any2rwkv_|qwerky|radlads|hrwkv|^rwkv\d+qwen\d")
ONLY_ARWKV = "of RWKV models made from transformers only ARWKV is (rwkv_hybrid, arwkv7)"


def refuse_unsupported(model_type: object, file: str = "") -> None:
    """Raises `ConfigError` for a family that is known and cannot be served, and names ``file``."""
    for reason, families in REFUSED.items():
        if model_type in families:
            where = f"{file}: " if file else ""
            raise ConfigError(f"{where}{model_type} models are not supported: {reason}")
    if isinstance(model_type, str) and OTHER_HYBRIDS.search(model_type.lower()):
        where = f"{file}: " if file else ""
        raise ConfigError(f"{where}{model_type:.80} models are not supported: {ONLY_ARWKV}")


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config; `STATE_SPACES` and `MISTRAL` are the ``model_type`` of own layouts.

    Raises `ConfigError` for one of a family that is known and cannot be served, and `OSError`.
    """
    file = config_file(folder)
    values = read_json(file)
    if file.name == PARAMS:
        if values.get("model_type") != "mamba":
            raise ConfigError(f"{PARAMS}: of Mistral's own layout only model_type 'mamba' is read")
        return {"bos_token_id": MISTRAL_BOS, **values, "model_type": MISTRAL}
    refuse_config(values)
    family = values.get("model_type")
    if isinstance(family, str) and family not in (*READERS, *ARCHITECTURES):
        raise ConfigError(f"{file.name}: {family:.80} models are not supported; {INSTEAD}")
    if "model_type" not in values and {"d_model", "n_layer"} <= values.keys():
        return {"model_type": STATE_SPACES, **values}
    return values


def refuse_config(values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a ``config.json`` of a family that is known and cannot be served."""
    family = values.get("model_type")
    refuse_unsupported(family)
    if family == "rwkv" and values.get("architecture_version") != "rwkv7":
        raise ConfigError(
            "rwkv models are not supported if architecture_version is not 'rwkv7': they are RWKV-4,"
            " and of this family only RWKV-7 is"
        )
    text = values.get("text_config")
    for found in (values, text if isinstance(text, dict) else {}):
        if (quantized := found.get("quantization_config")) is not None:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else None
            raise ConfigError(
                f"config.json: quantization_config: weights quantised by {method!r:.40} are not"
                " supported: take the original, or a GGUF"
            )
    if values.get("attn_layer_idx"):  # Mamba's own files, which have no model_type
        raise ConfigError(f"config.json: attn_layer_idx is not supported: {GROWS}")


def read_gguf(file: GgufFile, name: str) -> tuple[Config, StoredWeights]:
    """Our config and weights for a GGUF file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the file and the key.
    """
    family = file.metadata.get("general.architecture")
    if not isinstance(family, str):
        raise ConfigError(f"{name}: general.architecture is missing, or no string")
    refuse_unsupported(family, name)
    attention = set() if family in WITH_ATTENTION else _layers(file, r"attn_(q|k|v|qkv)\.")
    reason = f": {GROWS if _layers(file, '') - attention else ALL_GROW}" if attention else ""
    is_served = READERS.get(family, ("", ""))[0].startswith("model.families.")
    if is_served and family not in GGUF_READERS:
        reason = " as GGUF, only as a folder"
    if reason or family not in GGUF_READERS:
        raise ConfigError(f"{name}: {family!r:.80} models are not supported{reason}; {INSTEAD}")
    module, function = GGUF_READERS[family]
    found: tuple[Config, StoredWeights] = getattr(import_module(module), function)(file, name)
    return found


class MultiTokenHead(NamedTuple):
    """A part of a file that predicts what follows the next token, as a model of its own.

    It has the embedding and the head of the file's model.
    """

    config: Config
    weights: Mapping[str, Array]


def read_head(
    values: Mapping[str, Any], tensors: Mapping[str, Array], config: Config
) -> MultiTokenHead | None:
    """The one next to the model that `read` has read as ``config``."""
    place = HEAD_READERS.get(values["model_type"])
    found = place and load_class(place)(values, tensors, config)
    return MultiTokenHead(*found) if found else None


def read_gguf_head(file: GgufFile, config: Config) -> MultiTokenHead | None:
    """The one next to the model that `read_gguf` has read as ``config``."""
    place = GGUF_HEAD_READERS.get(file.metadata["general.architecture"])
    found = place and load_class(place)(file, config)
    return MultiTokenHead(*found) if found else None


def _layers(file: GgufFile, kind: str) -> set[str]:
    """The numbers of the layers that have a tensor of this kind."""
    matches = (re.match(rf"blk\.(\d+)\.{kind}", tensor) for tensor in file)
    return {match[1] for match in matches if match}


def is_foreign(model_type: object) -> bool:
    """Whether there is a reader for this ``model_type``."""
    return isinstance(model_type, str) and model_type in READERS


def needs_no_numbers(model_type: str) -> bool:
    """Whether the reader for ``model_type`` reads the tensors' shapes alone."""
    return READERS[model_type][1] in _BY_SHAPES


def read(
    values: dict[str, Any], tensors: Mapping[str, Array], vocab_size: int, eos_token_id: int
) -> tuple[Config, Mapping[str, Array]]:
    """Our config and weights for a foreign config.json and the tensors of its weight files.

    ``vocab_size`` is the tokenizer's: ids above it have no text, and files hold them only to
    make a round number, so they are cut off. ``eos_token_id``, the tokenizer's too, is taken
    where the file names none. Raises `ConfigError` or `CheckpointError`; the arguments are
    not changed.
    """
    values = _with_tied(values, tensors)
    module, name = READERS[values["model_type"]]
    reader: Reader = getattr(import_module(module), name)
    for field in ("bos_token_id", "eos_token_id"):
        if values.get(field) is None:
            values = {**values, field: eos_token_id}
    source, weights = ForeignConfig(values, tensors), Weights(tensors)
    config, ours = reader(source, weights)
    source.refuse_unknown()
    weights.refuse_unknown()
    return _without_padding(config, ours, vocab_size)


def _with_tied(values: dict[str, Any], tensors: Mapping[str, Array]) -> dict[str, Any]:
    """``values`` where a null for whether the head is the embedding is what the files have."""
    tied = "tie_word_embeddings"
    if values.get(tied, False) is None:
        values = {**values, tied: not any(key.endswith("head.weight") for key in tensors)}
    if isinstance(text := values.get("text_config"), dict):
        values = {**values, "text_config": _with_tied(text, tensors)}
    return values


def _without_padding(
    config: Config, weights: Mapping[str, Array], vocab_size: int
) -> tuple[Config, Mapping[str, Array]]:
    # What is read only when asked for stays whole; ids without text are never drawn.
    if config.vocab_size <= vocab_size or not isinstance(weights, dict):
        return config, weights
    for name in weights.keys() & {"embedding.weight", "head.weight"}:
        # Another length is refused when it is loaded.
        if weights[name].shape[:1] == (config.vocab_size,):
            weights[name] = weights[name][:vocab_size]
    return _with_vocab_size(config, vocab_size), weights


def _with_vocab_size(config: Config, vocab_size: int) -> Config:
    changed: Config = dataclasses.replace(config, vocab_size=vocab_size)  # type: ignore[type-var]
    return changed
