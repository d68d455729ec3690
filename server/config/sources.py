"""Models and named states as an operator names them: ``NAME=SOURCE`` or a source alone."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from model.bundled_models import DEFAULT_NAME, bundled_models
from model.checkpoint_files import NO_LORA, Lora

#: What a model may be called: it is the name of a folder of its store, too.
MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

#: Comes before the file of a tuned state whose matrices have keys as rows.
TRANSPOSED = "transposed:"


class ModelSource(NamedTuple):
    """A model to serve: a folder, a bundled model's name or a hub id; None is the default.

    ``is_named`` where the operator gave the name, and it was not taken from the source.
    ``tokenizer`` is a tokenizer's file that is elsewhere, ``lora`` what is merged into its weights.
    """

    name: str
    source: str | None
    is_named: bool = False
    tokenizer: Path | None = None
    lora: Lora = NO_LORA


class StateFile(NamedTuple):
    """A file with a state. The matrices of one that is ``transposed`` have keys as rows."""

    path: Path
    transposed: bool = False


class StateSource(NamedTuple):
    """A file with a state that sessions of ``model`` can begin with; None is the first model.

    ``path`` is read by `state_file`.
    """

    name: str
    path: str
    model: str | None = None


def model_source(text: str) -> ModelSource:
    """``NAME=SOURCE``, or a source alone, which is named by its last part.

    A path with an equals sign before its first slash can be given as ``./a=b``.
    """
    name, equals, source = text.partition("=")
    if equals and source and re.fullmatch(MODEL_NAME, name):
        return ModelSource(name, source, is_named=True)
    return ModelSource(_short_name(text), text)


def _short_name(source: str) -> str:
    """The last part of a path, or of a name on the hub. Raises `ValueError`."""
    from model.hub.names import parse_name  # imports numpy

    name = None if os.path.exists(source) else parse_name(source)
    return Path(source).name if name is None else name.short


def state_source(text: str) -> StateSource:
    """``NAME=FILE`` or ``MODEL/NAME=FILE``. Raises `ValueError`."""
    found = re.fullmatch(f"(?:({MODEL_NAME})/)?({MODEL_NAME})=(.+)", text, re.DOTALL)
    if found is None:
        raise ValueError("must be NAME=FILE, or MODEL/NAME=FILE where there are several models")
    return StateSource(found[2], found[3], found[1])


def state_file(text: str) -> StateFile:
    """``FILE``, or ``transposed:FILE`` for a state that was tuned the other way round."""
    path = text.removeprefix(TRANSPOSED)
    return StateFile(Path(path).expanduser(), path != text)


def bundled_named(sources: tuple[ModelSource, ...]) -> tuple[ModelSource, ...]:
    """Of several models, bundled ones have names already.

    The default goes without one where no other does, so its sessions stay where they
    are when others are served next to it.
    """
    bundled = bundled_models()
    has_path = any(not each.is_named and each.source not in bundled for each in sources)
    plain = {DEFAULT_NAME} - ({DEFAULT_NAME} if has_path else set())
    return tuple(
        each._replace(is_named=True)
        if len(sources) > 1 and each.source in bundled.keys() - plain
        else each
        for each in sources
    )
