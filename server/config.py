"""The server's configuration: flags over environment over a file over defaults.

Nothing else reads the environment.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import os
import re
import stat
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from model.bundled_models import DEFAULT_NAME, bundled_models
from model.checkpoint_files import NO_LORA, Lora
from model.files import FileError, open_file, read_all

# -------------------------------------------------------------------------------------------------
# What values of settings may be, as an operator writes them: sizes, lists, models and states.

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
_Paths = Annotated[tuple[Path, ...], BeforeValidator(split)]
Keys = Annotated[
    tuple[str, ...],
    BeforeValidator(split),
    _each(r"[ -~]+", "a key must be printable ASCII and not empty"),
]
_Origins = Annotated[
    tuple[str, ...],
    BeforeValidator(split),
    _each(r"\*|https?://[^/\s]+", "an origin is scheme://host[:port] without a path, or *"),
]
_Hosts = Annotated[
    tuple[str, ...],
    BeforeValidator(split),
    _each(r"\*|[A-Za-z0-9._-]+", "a host is a name without a port, or *"),
]
_Networks = Annotated[tuple[str, ...], BeforeValidator(split), AfterValidator(_networks)]
_Reasoning = Annotated[str | None, BeforeValidator(_on_off_or_tokens)]
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


def _state_source(text: str) -> StateSource:
    """``NAME=FILE`` or ``MODEL/NAME=FILE``. Raises `ValueError`."""
    found = re.fullmatch(f"(?:({MODEL_NAME})/)?({MODEL_NAME})=(.+)", text, re.DOTALL)
    if found is None:
        raise ValueError("must be NAME=FILE, or MODEL/NAME=FILE where there are several models")
    return StateSource(found[2], found[3], found[1])


def state_file(text: str) -> StateFile:
    """``FILE``, or ``transposed:FILE`` for a state that was tuned the other way round."""
    path = text.removeprefix(TRANSPOSED)
    return StateFile(Path(path).expanduser(), path != text)


def _bundled_named(sources: tuple[ModelSource, ...]) -> tuple[ModelSource, ...]:
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


# -------------------------------------------------------------------------------------------------
# What is said of a setting that cannot be, and by which names the operator knows it.


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


# -------------------------------------------------------------------------------------------------
# The environment of the process: the only module that reads or writes it.


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


# -------------------------------------------------------------------------------------------------
# The file of settings, ``everstream serve --config FILE``: TOML, a key for each setting.


#: Of a file of settings.
MAX_BYTES = 1 << 20

logger = logging.getLogger("everstream.config")

#: Settings that others must not read.
SECRETS = frozenset({"api_keys", "admin_keys", "signing_key"})


class ConfigFileError(FileError):
    """A file that cannot be used. The message names it, and the key."""


def read_config_file(path: Path, names: Collection[str]) -> dict[str, Any]:
    """The settings in the file, by their ``names``; arrays are tuples.

    Raises `ConfigFileError`. A value is never part of the message.
    """
    try:
        with open_file(path.expanduser()) as file:
            mode = os.fstat(file.fileno()).st_mode
            values = tomllib.loads(read_all(file, MAX_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise ConfigFileError(f"{path}: not TOML: {_place(error)}") from None
    _check_mode(path, mode, values.keys())
    for key in values:
        if key not in names:
            raise ConfigFileError(f"{path}: {key}: unknown setting{_similar(key, names)}")
    return {key: _plain(path, key, value) for key, value in values.items()}


def _check_mode(path: Path, mode: int, keys: Collection[str]) -> None:
    """Who can write the file decides who may administer the server."""
    if mode & stat.S_IWOTH:
        raise ConfigFileError(f"{path}: everybody may write it; chmod 600")
    if mode & (stat.S_IWGRP | stat.S_IRWXO) and not SECRETS.isdisjoint(keys):
        logger.warning("%s: has keys, and others may read or write it; chmod 600", path)


def _place(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    known = isinstance(error, tomllib.TOMLDecodeError)
    return str(error) if known else "a number is too long, or it is too deeply nested"


def _similar(key: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(key, names, 1)
    return f"; is {close[0]} meant?" if close else ""


def _plain(path: Path, key: str, value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str | int | float):
        return value
    raise ConfigFileError(f"{path}: {key}: must be a string, a number, true, false or an array")


# -------------------------------------------------------------------------------------------------
# It is read here and nowhere else.


MIB = 1 << 20
#: The replica that takes over computes again what came after the last state, while clients wait.
SHARED_SAVE_INTERVAL = 256


class ServerConfig(BaseModel):
    """Everything an operator may choose. Frozen; `load` builds it from flags and environment.

    `server.cli.serve.FLAGS` says what each setting with a flag is, docs/operate/settings.md
    what all are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Path | None = None
    model: tuple[ModelSource, ...] = (ModelSource(DEFAULT_NAME, None),)
    served_model_name: str | None = Field(default=None, pattern=f"^{MODEL_NAME}$")
    tokenizer: Path | None = None
    lora: _Paths = ()
    lora_alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    #: None: no model can be loaded at run time.
    model_dir: Path | None = None
    state: tuple[StateSource, ...] = ()
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    backend: Literal["auto", "native", "torch"] = "auto"
    #: None leaves the number to the backend.
    threads: int | None = Field(default=None, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto"
    #: Of the sums in a session's state: "bfloat16" halves them.
    state_dtype: Literal["float32", "bfloat16"] = "float32"

    #: "auto" drafts tokens where that makes a stream faster; the text is the same.
    speculation: Literal["auto", "off"] = "auto"
    #: What drafts for the one model, in addition to its past: a folder, file or name as in `model`.
    draft_model: str | None = Field(default=None, min_length=1)
    #: "on", "off", "template" (what that does by itself) or a maximum of tokens, for chats with
    #: models that think; None is the default of the family, or else of the template.
    reasoning: _Reasoning = None

    #: Positions that the attention layers of a model keep, if it has any; None leaves it to the
    #: memory. At the bound texts stop, or old positions slide out. Of a model with windows, what
    #: the longest keeps; None leaves them as they are.
    context: int | None = Field(default=None, ge=32)
    past: Literal["stop", "slide"] = "stop"
    #: The state pool has so many slots, or so many bytes: at most one of the two is set.
    max_sessions: int | None = Field(default=None, ge=1)
    state_memory: ByteCount | None = Field(default=None, ge=1)
    #: Bytes of states outside the pool, as is `prefix_cache`. Bounds of memory and of the store are
    #: those of each model.
    sleep_memory: ByteCount = Field(default=256 * MIB, ge=0)
    #: Requests that are admitted and not yet running.
    max_waiting: int = Field(default=256, ge=0)
    session_ttl_s: float = Field(default=900.0, gt=0, allow_inf_nan=False)

    #: A folder, the URL of a PostgreSQL database that replicas share, or "memory"; `load` puts a
    #: folder of the user's in the place of None.
    store: str | None = Field(default=None, repr=False)
    durability: Literal["full", "relaxed"] = "full"
    store_size: ByteCount | None = Field(default=None, ge=MIB)
    retention_s: float = Field(default=30 * 86_400.0, gt=0, allow_inf_nan=False)
    max_detached_tokens: int = Field(default=4096, ge=0)
    continue_on_start: bool = False
    trust_unsigned_state: bool = False
    prefix_cache: ByteCount = Field(default=64 * MIB, ge=0)
    #: None leaves it to the store: see `server.models.storage.has_prefix_tier`.
    prefix_disk: ByteCount | None = Field(default=None, ge=0)

    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_tokens_limit: int = Field(default=1_000_000, ge=1)
    max_body_bytes: int = Field(default=MIB, ge=1024)
    max_message_bytes: int = Field(default=MIB, ge=1024)
    max_answer_bytes: int = Field(default=64 * MIB, ge=MIB)
    max_connections: int | None = Field(default=None, ge=1)
    max_connections_per_address: int | None = Field(default=None, ge=1)
    keep_alive_s: float = Field(default=5.0, gt=0, le=3600, allow_inf_nan=False)
    heartbeat_s: float = Field(default=15.0, ge=0, le=3600, allow_inf_nan=False)
    max_socket_requests: int = Field(default=64, ge=1)
    #: Events that wait for one slow reader.
    max_queued_events: int = Field(default=2048, ge=16)
    #: Bytes that a store in memory keeps.
    store_memory: ByteCount = Field(default=256 * MIB, ge=MIB)
    max_log_tokens: int = Field(default=1_000_000, ge=4096)
    save_interval_tokens: int = Field(default=1024, ge=16)
    #: Named states that a model's store has in addition to the files in `state`.
    max_states: int = Field(default=64, ge=0)
    store_lease_s: float = Field(default=10.0, ge=3, allow_inf_nan=False)
    #: Leads to the database itself where `store` is a pooler's.
    store_direct: str | None = Field(default=None, repr=False)
    #: The bucket that has the states of a shared store.
    store_objects: str | None = Field(default=None, repr=False)
    signing_key: str | None = Field(default=None, min_length=16, repr=False)

    api_keys: Keys = Field(default=(), repr=False)
    admin_keys: Keys = Field(default=(), repr=False)
    keys_file: Path | None = None
    allowed_origins: _Origins = ()
    allowed_hosts: _Hosts = ()
    trusted_proxies: _Networks = ()
    drain_timeout_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    retire_timeout_s: float = Field(default=3600.0, ge=0, allow_inf_nan=False)

    ray: bool = False
    ray_address: str | None = None
    replicas: Replicas = "1"
    target_streams: int = Field(default=64, ge=1)
    scale_down_delay_s: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    session_tag: str = Field(default="", pattern=r"^(?:[0-9a-f]{8})?$")

    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    access_log: bool = False
    otel_endpoint: str | None = None

    @field_validator("port", mode="before")
    @classmethod
    def _no_address(cls, value: object) -> object:
        """Kubernetes gives each pod the addresses of the Services, in variables of their names."""
        if isinstance(value, str) and "://" in value:
            raise ValueError(
                "is an address; Kubernetes sets it for a Service named everstream, "
                "unless the pod has enableServiceLinks: false"
            )
        return value

    @field_validator("model", mode="before")
    @classmethod
    def _sources(cls, value: object) -> object:
        """``name=source`` or ``source``, once or several times, with commas in a variable."""
        value = split(value)
        if not isinstance(value, tuple) or not all(isinstance(part, str) for part in value):
            return value
        return _bundled_named(tuple(map(model_source, value)))

    @field_validator("model")
    @classmethod
    def _own_names(cls, value: tuple[ModelSource, ...]) -> tuple[ModelSource, ...]:
        if not value or not all(source.name for source in value):
            raise ValueError("must name a model")
        if len({source.name for source in value}) < len(value):
            raise ValueError("two models have the same name; give them as NAME=PATH")
        if sum(not source.is_named for source in value) > 1:
            raise ValueError("of several models all but one must be bundled or given as NAME=PATH")
        return value

    @field_validator("state", mode="before")
    @classmethod
    def _states(cls, value: object) -> object:
        """``name=file`` or ``model/name=file``, with commas between several in a variable."""
        value = split(value)
        if not isinstance(value, tuple) or not all(isinstance(part, str) for part in value):
            return value
        return tuple(map(_state_source, value))

    @model_validator(mode="after")
    def _one_capacity(self) -> Self:
        if self.max_sessions is not None and self.state_memory is not None:
            raise ValueError("--max-sessions and --state-memory exclude each other")
        return self

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if self.served_model_name and (len(self.model) > 1 or self.model[0].is_named):
            raise ValueError("--served-model-name is for one model that is not given as NAME=PATH")
        return self

    @model_validator(mode="after")
    def _one_tokenizer_and_lora(self) -> Self:
        if self.tokenizer and len(self.model) > 1:
            raise ValueError("--tokenizer is for one model")
        if self.lora and len(self.model) > 1:
            raise ValueError("--lora is for one model")
        if self.lora_alpha is not None and not self.lora:
            raise ValueError("--lora-alpha needs --lora")
        return self

    @model_validator(mode="after")
    def _draft_model_of_one(self) -> Self:
        if self.draft_model is None:
            return self
        if self.speculation == "off":
            raise ValueError("--draft-model needs --speculation auto")
        if len(self.model) > 1 or self.model_dir is not None:
            raise ValueError("--draft-model is for one model, without --model-dir")
        return self

    def _completed(self) -> Self:
        """With what one model has, and its served name; its sessions stay where they were."""
        if self.tokenizer is None and self.served_model_name is None and not self.lora:
            return self
        first, *others = self.model
        name = self.served_model_name or first.name
        lora = Lora(tuple(path.expanduser() for path in self.lora), self.lora_alpha)
        model = (first._replace(name=name, tokenizer=self.tokenizer, lora=lora), *others)
        return self.model_copy(update={"model": model})

    @model_validator(mode="after")
    def _states_of_models(self) -> Self:
        names = {self.served_model_name or source.name for source in self.model}
        for state in self.state:
            if state.model is not None and state.model not in names:
                raise ValueError(f"--state: {state.model}/{state.name}: no model has this name")
        first = self.served_model_name or self.model[0].name
        places = [(state.model or first, state.name) for state in self.state]
        if len(set(places)) < len(places):
            raise ValueError("--state: two states of a model have the same name")
        return self

    def states_of(self, model: str) -> Mapping[str, StateFile]:
        """The files of the states of ``model`` by their names."""
        first = self.model[0].name
        own = [state for state in self.state if (state.model or first) == model]
        return {state.name: state_file(state.path) for state in own}

    @property
    def num_replicas(self) -> tuple[int, int]:
        """The fewest and the most replicas; the same number twice where it is fixed."""
        low, _, high = self.replicas.partition("-")
        return int(low), int(high or low)

    @property
    def is_shared(self) -> bool:
        """Whether other replicas may have the same store."""
        return str(self.store).startswith(("postgresql://", "postgres://"))

    @property
    def wants_key(self) -> bool:
        """Whether a caller must show a key."""
        return bool(self.api_keys or self.admin_keys or self.keys_file)

    @property
    def is_open(self) -> bool:
        """Whether every caller from another machine may use it."""
        return not self.wants_key and not is_loopback(self.host)

    @classmethod
    def load(cls, environment: Mapping[str, str] = ENVIRONMENT, **flags: Any) -> ServerConfig:
        """The configuration from ``flags`` (None = not given), then ``EVERSTREAM_*``, then a file.

        Raises `ConfigError` with one line per bad setting. A value is never
        repeated in the message: it may be a key.
        """
        given = variables_of(cls.model_fields, environment)
        given |= {name: value for name, value in flags.items() if value is not None}
        filed = _filed(given.get("config"), cls.model_fields.keys() - {"config"})
        chosen = filed | given
        try:
            config = cls(**chosen)
        except ValidationError as error:
            file = {name: f"{given['config']}: {name}" for name in filed.keys() - given.keys()}
            raise ConfigError("\n".join(explain(item, file) for item in error.errors())) from None
        if config.is_shared and "save_interval_tokens" not in chosen:
            config = config.model_copy(update={"save_interval_tokens": SHARED_SAVE_INTERVAL})
        if config.store is None:
            unnamed = [source.name for source in config.model if not source.is_named]
            store = "/".join([state_folder(environment), "everstream", *unnamed])
            config = config.model_copy(update={"store": store})
        return config._completed()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _filed(path: object, names: Collection[str]) -> dict[str, Any]:
    """What the configuration file says. Raises `ConfigError`."""
    if path is None:
        return {}
    try:
        return read_config_file(Path(str(path)), names)
    except ConfigFileError as error:
        raise ConfigError(f"--config: {error}") from error
