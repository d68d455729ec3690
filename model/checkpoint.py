"""Checkpoints: a folder of ``config.json``, ``model.safetensors`` and ``tokenizer.json``.

Keys and shapes are checked strictly, and a digest over config, weights and
tokenizer names the model: a session's state means something only to the model
that made it. Folders of other projects load too, where `model.foreign` knows
the ``model_type`` of their config; their weights may be several files beside
an index.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import ModelConfig, read_json
from model.lm import LanguageModel
from model.tokenizer import Tokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
FILES = (CONFIG, WEIGHTS, TOKENIZER)


class CheckpointError(ValueError):
    """A folder that is no checkpoint of this project. The message names the file and the key."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model. ``digest`` is SHA-256 in hex over the three files."""

    model: LanguageModel
    tokenizer: Tokenizer
    digest: str

    @property
    def config(self) -> ModelConfig:
        return self.model.config


def save_checkpoint(
    folder: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the three files, the weights as ``dtype`` (default: as they are)."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save(folder / CONFIG)
    tokenizer.save(folder / TOKENIZER)
    weights = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def load_checkpoint(
    source: str | Path, dtype: torch.dtype = torch.float32, revision: str | None = None
) -> Checkpoint:
    """Loads a folder, or a Hugging Face hub id where ``huggingface_hub`` is installed.

    The model is in evaluation mode with its weights as ``dtype``. Raises
    `CheckpointError`, `ConfigError` or `TokenizerError`.
    """
    folder = locate(source, revision)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    config, weights = _read(folder, tokenizer)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{TOKENIZER} has {tokenizer.vocab_size} ids, vocab_size is {config.vocab_size}"
        )
    model = LanguageModel(config)
    _load_weights(model, weights)
    model.to(dtype).eval().requires_grad_(False)
    return Checkpoint(model, tokenizer, _digest(folder))


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The folder of ``source``, fetched from the hub where it is no local folder."""
    folder = Path(source)
    if folder.is_dir():
        return _complete(folder)
    if str(source).count("/") != 1 or str(source).startswith((".", "/")):
        raise CheckpointError(f"{source} is no folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{source} is no folder; to load it from the hub: pip install 'everstream[hub]'"
        ) from error
    try:
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # HTTP, cache and name errors, which share no base class
        raise CheckpointError(f"{source} cannot be had from the hub: {error}") from error
    return _complete(folder)


_PATTERNS = [*FILES, INDEX, "model-*.safetensors"]


def _complete(folder: Path) -> Path:
    for name in FILES:
        if not (folder / name).is_file() and not (name == WEIGHTS and (folder / INDEX).is_file()):
            raise CheckpointError(f"{folder} has no {name}")
    return folder


def _read(folder: Path, tokenizer: Tokenizer) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and weights, in our names whatever the folder's."""
    # Imported here because the readers raise this module's error.
    from model import foreign

    values = read_json(folder / CONFIG)
    if not foreign.is_foreign(values.get("model_type")):
        return ModelConfig.from_dict(values), _read_weights(folder)
    return foreign.read(values, _read_weights(folder), tokenizer.vocab_size, tokenizer.eos_token_id)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            weights.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """The one file, or those that the index names, in order."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{INDEX} has no weight_map of file names")
    files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if file.parent != folder:
            raise CheckpointError(f"{INDEX} names a file outside the folder: {file.name!r}")
    return files


def _load_weights(model: LanguageModel, weights: dict[str, Tensor]) -> None:
    wanted = model.state_dict()
    for kind, names in (
        ("lacks", wanted.keys() - weights.keys()),
        ("has an unknown", weights.keys() - wanted.keys()),
    ):
        if names:
            raise CheckpointError(f"{WEIGHTS} {kind} key {min(names)!r} ({len(names)} in all)")
    for name, tensor in wanted.items():
        if weights[name].shape != tensor.shape:
            raise CheckpointError(
                f"{WEIGHTS}: {name} is {list(weights[name].shape)}, wanted {list(tensor.shape)}"
            )
    model.load_state_dict(weights)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in (folder / CONFIG, *_weight_files(folder), folder / TOKENIZER):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
