"""The environment of the process: the only module that reads or writes it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from server.config.errors import PREFIX, ConfigError

ENVIRONMENT: Mapping[str, str] = os.environ


def variables_of(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that have a variable, by their names. Raises `ConfigError`."""
    found = {name: environment.get(PREFIX + name.upper()) for name in names}
    found |= {name: _keys_of(name, environment) for name in ("api_keys", "admin_keys")}
    return {name: value for name, value in found.items() if value is not None}


def state_folder(environment: Mapping[str, str]) -> str:
    """Where a user's programs keep their state."""
    return environment.get("XDG_STATE_HOME") or "~/.local/state"


def object_storage_environment(environment: Mapping[str, str] = ENVIRONMENT) -> dict[str, str]:
    """The usual variables of an S3-compatible object storage, credentials among them."""
    return {name: value for name, value in environment.items() if name.startswith("AWS_")}


def set_environment(variables: Mapping[str, str]) -> None:
    """For a package that is imported next, and the processes that it starts."""
    os.environ.update(variables)


def _keys_of(name: str, environment: Mapping[str, str]) -> str | None:
    """The variable of ``name`` and its singular, which the clients read, together.

    Raises `ConfigError` where one is set and has no key: it would open the server.
    """
    plural = PREFIX + name.upper()
    given = {each: environment[each] for each in (plural, plural[:-1]) if each in environment}
    for variable, value in given.items():
        if not value.replace(",", "").strip():
            raise ConfigError(f"{variable}: is set and has no key; unset it to serve without keys")
    return ",".join(given.values()) or None
