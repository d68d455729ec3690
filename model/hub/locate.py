"""Where a model is: a folder or a file, a bundled model, or one from the hub."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from model.bundled_models import bundled_models
from model.checkpoint_files import CONFIG, FILE_SUFFIXES, PARAMS, is_readable
from model.hub.names import parse_name
from model.weights import FORMS, WEIGHTS, CheckpointError


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The folder of ``source``: a local one, else a bundled model's, else one from the hub.

    A ``.pth`` or ``.gguf`` file is itself what is located. What is on disk of
    ``OWNER/NAME[@REVISION][:FILE]`` is taken as it is; else it is downloaded, which needs
    ``huggingface_hub``.
    Raises `CheckpointError` or `ConfigError`.
    """
    folder = Path(source)
    if os.path.isdir(folder):
        return _complete(folder)
    if folder.suffix in FILE_SUFFIXES and is_readable(folder):
        return folder
    if str(source) in bundled_models():
        return _complete(bundled_models()[str(source)])
    name = parse_name(str(source))
    if name is None:
        raise CheckpointError(f"{source}: {_why_no_folder(folder)}")
    from model.hub.pull import local_or_pulled  # most models are on disk

    found = local_or_pulled(name if revision is None else replace(name, revision=revision))
    return _complete(found) if found.is_dir() else found


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
    """The folder, which has a config and weights; its tokenizer may be elsewhere."""
    for name in (CONFIG, WEIGHTS):
        instead = sum(FORMS, ()) if name == WEIGHTS else (PARAMS,)
        if not any(is_readable(folder / file) for file in (name, *instead)):
            raise CheckpointError(f"{folder} has no {name}")
    return folder
