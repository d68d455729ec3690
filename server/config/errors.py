"""What is said of a setting that cannot be, and by which names the operator knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "EVERSTREAM_"

#: Bounds that few operators change: these have no flag.
VARIABLE_ONLY = frozenset(
    {
        "max_prompt_tokens",
        "max_tokens_limit",
        "max_body_bytes",
        "max_message_bytes",
        "max_answer_bytes",
        "max_connections",
        "max_connections_per_address",
        "keep_alive_s",
        "heartbeat_s",
        "max_socket_requests",
        "max_queued_events",
        "store_memory",
        "max_log_tokens",
        "max_states",
        "save_interval_tokens",
        "store_lease_s",
        "store_direct",
        "store_objects",
        "signing_key",
        "target_streams",
        "scale_down_delay_s",
        "session_tag",
    }
)


class ConfigError(ValueError):
    """A setting that cannot be; the message names its flag and its variable."""


def flag_of(field: str) -> str:
    """The command line flag of a field: ``session_ttl_s`` is ``--session-ttl``."""
    names = {
        "api_keys": "api_key",
        "admin_keys": "admin_key",
        "allowed_origins": "allow_origin",
        "allowed_hosts": "allow_host",
        "trusted_proxies": "trusted_proxy",
    }
    name = names.get(field, field)
    return "--" + name.removesuffix("_s").replace("_", "-")


def explain(item: Any, file: Mapping[str, str]) -> str:
    """The line of one of pydantic's errors; ``file`` has the names of what comes from a file."""
    message = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return str(message)
    field = str(item["loc"][0])
    variable = PREFIX + field.upper()
    name = variable if field in VARIABLE_ONLY else f"{flag_of(field)} ({variable})"
    name = file.get(field, name)
    return f"{name}: {message[0].lower()}{message[1:]}"
