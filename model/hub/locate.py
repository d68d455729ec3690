"""Where a model is: a folder or a file, a bundled model, or one from the hub."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from model.bundled_models import bundled_models
from model.checkpoint_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    CONFIGS,
    PARAMS,
    is_model_file,
    is_readable,
)
from model.files import one_line, read_json
from model.hub.base import has_base
from model.hub.names import parse_name
from model.weights import FORMS, WEIGHTS, CheckpointError
from model.weights.gguf_file import is_first_part

#: Begins the names of GGUF files that see images, next to the model.
_NO_MODEL = "mmproj"


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The folder of ``source``: a local one, else a bundled model's, else one from the hub.

    A ``.pth`` or ``.gguf`` file is itself what is located, also where it is all that a folder has
    of a model. What is on disk of
    ``OWNER/NAME[@REVISION][:FILE]`` is taken as it is; else it is downloaded, which needs
    ``huggingface_hub``.
    Raises `CheckpointError` or `ConfigError`.
    """
    folder = Path(source)
    if os.path.isdir(folder):
        return _single_file(folder) or _complete(folder)
    if is_model_file(folder):
        return folder
    if str(source) in bundled_models():
        return _complete(bundled_models()[str(source)])
    name = parse_name(str(source))
    if name is None:
        raise CheckpointError(f"{source}: {_why_no_folder(folder)}")
    from model.hub.pull import local_or_pulled  # most models are on disk

    found = local_or_pulled(name if revision is None else replace(name, revision=revision))
    return _complete(found) if found.is_dir() else found


def bundled_or_local(source: str) -> Path | None:
    """The folder of a model that is on disk without a pull, whole or not."""
    return Path(source) if os.path.isdir(source) else bundled_models().get(source)


def _single_file(folder: Path) -> Path | None:
    """The one model file of a folder without a config, which is the model then."""
    if any(is_readable(folder / name) for name in CONFIGS):
        return None
    names = sorted(name for name in os.listdir(folder) if not name.startswith(_NO_MODEL))
    files = [folder / name for name in names if is_first_part(name)]
    files = [file for file in files if is_model_file(file)]
    if len(files) > 1:
        listed = ", ".join(file.name for file in files[:5])
        raise CheckpointError(f"{folder} has {len(files)} models, name one: {listed}")
    return files[0] if files else None


def _why_no_folder(path: Path) -> str:
    try:
        path.stat()
    except FileNotFoundError:
        return (
            "there is no such folder; a model is a folder with config.json, a .pth, .st or"
            f" .gguf file, {', '.join(bundled_models())}, or owner/name on the Hugging Face hub"
        )
    except OSError as error:
        return str(error.strerror)
    return "not a folder; a model is a folder with config.json, or a .pth, .st or .gguf file"


def _complete(folder: Path) -> Path:
    """The folder, which has a config and weights; its tokenizer and its base may be elsewhere."""
    weights = ADAPTER if has_base(folder) else WEIGHTS
    for name in (CONFIG, weights):
        instead = {CONFIG: (PARAMS,), WEIGHTS: sum(FORMS, ())}.get(name, ())
        if not any(is_readable(folder / file) for file in (name, *instead)):
            raise CheckpointError(f"{folder} has no {name}{_of_adapter(folder)}")
    return folder


def _of_adapter(folder: Path) -> str:
    """What else to say of a folder that has changes of a model alone."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return ""
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    named = f" ({one_line(base)[:80]})" if isinstance(base, str) and base else ""
    return f": it is an adapter, for --lora; --model is what it was trained on{named}"
