"""What values of settings may be, as an operator writes them: sizes, lists, models and states."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator

from model.bundled_models import DEFAULT_NAME, bundled_models
from model.checkpoint_files import NO_LORA, Lora

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes in ``"2GiB"``, ``"500MB"`` or ``"1048576"``; raises `ValueError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError("must be a size such as 512MiB or 2GiB")
    return int(float(match[1]) * unit)


def split(value: object) -> object:
    """A variable holds several values with commas between them."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _each(pattern: str, message: str) -> AfterValidator:
    """All values must match ``pattern``."""

    def check(values: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(pattern, value) for value in values):
            raise ValueError(message)
        return values

    return AfterValidator(check)


def _networks(values: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for network in values:
            ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise ValueError("a proxy is an address, or a network such as 10.0.0.0/8") from None
    return values


def _on_off_or_tokens(value: object) -> str | None:
    if value is None:
        return None
    text = str(value)  # a file may have a number
    if not re.fullmatch(r"on|off|template|[1-9]\d{0,8}", text, re.ASCII):
        raise ValueError("must be on, off, template, or the most tokens that a model may think")
    return text


def _range_of_replicas(value: str) -> str:
    found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", value, re.ASCII)
    if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
        raise ValueError("must be a number of replicas, or MIN-MAX")
    return value


ByteCount = Annotated[
    int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value)
]
Paths = Annotated[tuple[Path, ...], BeforeValidator(split)]
Keys = Annotated[
    tuple[str, ...],
    BeforeValidator(split),
    _each(r"[ -~]+", "a key must be printable ASCII and not empty"),
]
Origins = Annotated[
    tuple[str, ...],
    BeforeValidator(split),
    _each(r"\*|https?://[^/\s]+", "an origin is scheme://host[:port] without a path, or *"),
]
Hosts = Annotated[
    tuple[str, ...],
    BeforeValidator(split),
    _each(r"\*|[A-Za-z0-9._-]+", "a host is a name without a port, or *"),
]
Networks = Annotated[tuple[str, ...], BeforeValidator(split), AfterValidator(_networks)]
Reasoning = Annotated[str | None, BeforeValidator(_on_off_or_tokens)]
Replicas = Annotated[str, AfterValidator(_range_of_replicas)]


# -------------------------------------------------------------------------------------------------
# Models and named states as an operator names them: ``NAME=SOURCE`` or a source alone.


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
