"""The environment of the process: the only module that reads or writes it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from server.config.errors import PREFIX, ConfigError

ENVIRONMENT: Mapping[str, str] = os.environ


#: Settings that protect the server. An empty variable may be a secret that is missing.
_PROTECTING = ("api_keys", "admin_keys", "keys_file", "signing_key")


def variables_of(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that have a variable, by their names; an empty one leaves the default.

    Raises `ConfigError` for an empty one that would leave the server without protection.
    """
    found = {name: _values_of(name, environment) for name in names}
    for name in _PROTECTING:
        for variable, value in found.get(name, {}).items():
            if not value.replace(",", "").strip():
                raise ConfigError(f"{variable}: is set and empty; unset it to serve without")
    joined = {name: ",".join(filter(str.strip, values.values())) for name, values in found.items()}
    return {name: value for name, value in joined.items() if value}


def state_folder(environment: Mapping[str, str]) -> str:
    """Where a user's programs keep their state."""
    return environment.get("XDG_STATE_HOME") or "~/.local/state"


def object_storage_environment(environment: Mapping[str, str] = ENVIRONMENT) -> dict[str, str]:
    """The usual variables of an S3-compatible object storage, credentials among them."""
    return {name: value for name, value in environment.items() if name.startswith("AWS_")}


def set_environment(variables: Mapping[str, str]) -> None:
    """For a package that is imported next, and the processes that it starts."""
    os.environ.update(variables)


def _values_of(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What is in the variable of ``name``, and for keys in its singular, which the clients read."""
    plural = PREFIX + name.upper()
    variables = (plural, plural[:-1]) if name in ("api_keys", "admin_keys") else (plural,)
    return {each: environment[each] for each in variables if each in environment}
