"""A configuration as plain data: all of ours that crosses to a replica, or comes from a file.

A replica reads it over its own machine's `EVERSTREAM_*` variables, so that what is
secret or differs by machine can stay there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.config.settings import ServerConfig
from server.config.sources import TRANSPOSED, ModelSource, StateSource, state_file

#: For the process that starts Ray, and for no replica.
OF_THE_CLUSTER = frozenset({"config", "host", "port", "ray", "ray_address"})

Settings = dict[str, Any]


def settings_of(config: ServerConfig) -> Settings:
    """What was chosen in ``config``, as JSON has it; paths are absolute."""
    chosen = config.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_CLUSTER))
    if "model" in chosen:
        chosen["model"] = [text for source in config.model if (text := _text(source)) is not None]
        if not chosen["model"]:
            del chosen["model"]
    if "state" in chosen:
        chosen["state"] = [_state_text(state) for state in config.state]
    for name in ("keys_file", "model_dir"):
        if chosen.get(name) is not None:
            chosen[name] = str(Path(chosen[name]).absolute())
    if "lora" in chosen:
        chosen["lora"] = [str(path.expanduser().absolute()) for path in config.lora]
    return {name: value for name, value in chosen.items() if value is not None}


def read_settings(settings: Mapping[str, Any]) -> ServerConfig:
    """The configuration that `settings_of` wrote, or a person. Raises `ConfigError`."""
    flags: Settings = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    if isinstance(number := flags.get("replicas"), int):
        flags["replicas"] = str(number)
    return ServerConfig.load(**flags)


def _state_text(state: StateSource) -> str:
    """The state as the flag ``--state`` names it."""
    path, is_transposed = state_file(state.path)
    name = f"{state.model}/{state.name}" if state.model else state.name
    return f"{name}={TRANSPOSED if is_transposed else ''}{path.absolute()}"


def _text(source: ModelSource) -> str | None:
    """The source as the flag ``--model`` names it."""
    if source.source is None:
        return None
    place = source.source
    if Path(place).exists():
        place = str(Path(place).absolute())
    return f"{source.name}={place}" if source.is_named else place
