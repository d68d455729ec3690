"""What values of settings may be, as an operator writes them: sizes, and lists with commas."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

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
