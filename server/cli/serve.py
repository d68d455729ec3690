"""``everstream serve``. Each flag is a setting of `server.config.ServerConfig`."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
from inspect import Parameter, Signature
from ipaddress import ip_address
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from model.chat import PLAIN
from server.cli.options import fail, version
from server.config import ConfigError, flag_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.config import ServerConfig
    from server.models.registry import Models
    from server.models.service import ModelInfo
    from server.models.storage import Shared
    from server.observability.tracing import Tracer


# -------------------------------------------------------------------------------------------------
# What the server prints before it answers: what runs, and how to see it.


#: The last thing that is printed before the server answers, so that it stays on the screen.
OPEN_WARNING = """\
****************************************************************************
WARNING: this server has no API key and listens on {host}.
Anyone who reaches this address can use it, and read and delete every session.
Give it a key:       EVERSTREAM_API_KEY=... (or --api-key, --keys-file)
Or keep it private:  --host 127.0.0.1, or a container port published there
****************************************************************************
"""

#: What the bundled models are for, by name; the page of models/bundled says more.
PURPOSES = {
    "smollm2": "chats, from a state that does not grow",
    "everstream-stories": "continues stories and answers no questions",
}
_PAGES = Path(__file__).parents[2] / "docs" / "README.md"
#: A clone has the pages; an installed package says what it has.
DOCUMENTATION = str(_PAGES) if _PAGES.is_file() else "everstream --help"


def greet(config: ServerConfig, models: Models, port: int) -> None:
    """Prints what is served, and how to try it."""
    from server.cli.inspect import format_bytes

    for served in models.versions:
        info, backend = served.service.model, served.service.transfer.identity.backend
        where = "on torch" if backend == "torch" else "on the native runtime"
        purpose = f", which {PURPOSES[info.name]}" if info.name in PURPOSES else ""
        typer.echo(
            f"Everstream serves {info.name}{purpose}: {info.parameters / 1e6:.1f}M parameters,"
            f" {info.attention}, {info.dtype}, {where}.\n"
            f"{info.max_sessions:,} sessions of {format_bytes(info.state_bytes_per_session)} each,"
            f" {_growth(info)}.\n"
        )
    invite(config, port, chats=models.versions[0].service.chat_template.source != PLAIN)


def _growth(info: ModelInfo) -> str:
    """How the memory of a session depends on its text."""
    if not info.context:
        return "at token ten and at token ten million"
    per_token = (
        f"{info.fixed_state_bytes:,} bytes and {info.state_bytes_per_token:,} for each token"
    )
    ends = "where texts end" if info.past == "stop" else "after which old tokens slide out"
    return f"bounded: {per_token}, up to {info.context:,} (--context), {ends} (--past)"


def _openable(host: str) -> str:
    """``host`` as a browser takes it; for one that means all addresses, the loopback's."""
    with contextlib.suppress(ValueError):
        address = ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"[{host}]" if ":" in host else host


def _kept(store: str | None) -> str:
    """Where; the address of a database may have a password in it."""
    if store is None or store == "memory":
        return "in memory, and end with the server"
    if "://" in store:
        return "in the database"
    return f"in {store}"


def _bundled(folder: Path) -> str:
    """A model's name, and what has to be run before it is served."""
    from model.hub.base import has_base, place_of, pull_command

    needs_pull = has_base(folder) and place_of(folder) is None
    return f"{folder.name} (after {pull_command(folder)})" if needs_pull else folder.name


def invite(config: ServerConfig, port: int, chats: bool = False) -> None:
    """Prints a line that can be pasted to see tokens stream, and what comes after it.

    ``chats``: whether the first model answers questions.
    """
    from model.bundled_models import DEFAULT_NAME, bundled_models

    url = f"http://{_openable(config.host)}:{port}"
    path = "completions"
    body: dict[str, object] = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True}
    if chats:
        question = {"role": "user", "content": "Why is the sky blue?"}
        path, body = "chat/completions", {"messages": [question], "stream": True}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.wants_key else ""
    typer.echo(
        f"Open {url}/ or paste:\n\n"
        f"  curl -N {url}/v1/{path} {key}-H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'\n"
    )
    typer.echo(
        f"Sessions are kept {_kept(config.store)} (--store). Ctrl-C stops the server.\n"
        f"Documentation: {DOCUMENTATION}\n"
    )
    others = [folder for name, folder in bundled_models().items() if name != DEFAULT_NAME]
    if config.model[0].source is None and others:
        names = ", ".join(map(_bundled, others))
        typer.echo(f"Also bundled: {names} (--model NAME, repeated for several)\n")
    if config.is_open:
        typer.echo(OPEN_WARNING.format(host=config.host), err=True)
        logging.getLogger("everstream").warning("no API key, and listening on %s", config.host)


#: Each is a setting, the type that the command line reads it as, and what it is.
FLAGS: tuple[tuple[str, Any, str], ...] = (
    (
        "model",
        list[str],
        (
            "Folder, .pth, .st or .gguf file, bundled model or hub id; NAME=PATH for several"
            " [everstream-stories]."
        ),
    ),
    ("config", Path, "TOML file of settings, with the names of the variables."),
    ("served_model_name", str, "Name of the model in the API [its folder's name]."),
    ("tokenizer", Path, "Tokenizer file, if it is not in the model's folder."),
    (
        "lora",
        list[Path],
        "LoRA or MiSS file, or folder of peft, to merge into the model; repeat for more.",
    ),
    ("lora_alpha", float, "Alpha of LoRA files that do not state theirs."),
    ("model_dir", Path, "Folder from which models can be loaded at run time."),
    (
        "state",
        list[str],
        "Initial state for sessions, as [MODEL/]NAME=[transposed:]FILE; repeat for more.",
    ),
    ("host", str, "Address to listen on [127.0.0.1]."),
    ("port", int, "Port to listen on; 0 selects a free one [8000]."),
    ("backend", str, "Runtime of the model: auto, native or torch [auto]."),
    ("threads", int, "Number of threads of the model [all cores, or 1 on torch]."),
    ("dtype", str, "Type of the weights: auto, float32, bfloat16, int8 or int4 [auto]."),
    ("state_dtype", str, "Type of the sums in a session's state: float32 or bfloat16 [float32]."),
    ("speculation", str, "Several tokens a step where drafts pay: auto or off [auto]."),
    ("draft_model", str, "Small model with the same vocabulary that drafts, given as --model is."),
    ("reasoning", str, "Thinking in chats: on, off, template, or its maximum tokens [by model]."),
    (
        "context",
        int,
        "Tokens of the past that attention layers keep, for models that have some [by memory].",
    ),
    ("past", str, "At that bound texts stop, or old tokens slide out: stop or slide [stop]."),
    ("max_sessions", int, "Number of session slots in the state pool."),
    (
        "state_memory",
        str,
        "Size of the state pool, such as 2GiB; excludes --max-sessions [512MiB].",
    ),
    ("max_waiting", int, "Maximum number of waiting requests [256]."),
    ("session_ttl_s", float, "Seconds until an idle session expires [900]."),
    ("api_keys", list[str], "API key that clients must send; repeat for more."),
    ("admin_keys", list[str], "API key with the admin scope; repeat for more."),
    ("keys_file", Path, "TOML file of keys with names, scopes and limits."),
    ("allowed_origins", list[str], "Origin whose pages may call the server; repeat for more."),
    (
        "allowed_hosts",
        list[str],
        "Host name allowed for a server without keys; repeat for more.",
    ),
    (
        "trusted_proxies",
        list[str],
        "Address or network of proxies whose X-Forwarded-For is read; repeat for more.",
    ),
    ("drain_timeout_s", float, "Seconds that running requests have to end at shutdown [10]."),
    ("retire_timeout_s", float, "Seconds that streams of a replaced model have to end [3600]."),
    (
        "store",
        str,
        "Store of sessions: a folder, postgresql://URL or memory [the user's state folder].",
    ),
    (
        "durability",
        str,
        "A commit survives a power cut (full) or a kill of the process (relaxed) [full].",
    ),
    ("store_size", str, "Maximum size of the store, such as 20GiB."),
    ("retention_s", float, "Seconds until an unused session is deleted [30 days]."),
    ("sleep_memory", str, "Memory for states of idle sessions without a slot [256MiB]."),
    ("prefix_cache", str, "Memory for the prefix cache; 0 disables it [64MiB]."),
    (
        "prefix_disk",
        str,
        "Disk space for prefix states that outlive a restart; 0 disables it [1GiB with a folder].",
    ),
    (
        "max_detached_tokens",
        int,
        "Maximum tokens that a session generates without a client [4096].",
    ),
    ("continue_on_start", bool, "Continue requests that ran when the server stopped."),
    ("trust_unsigned_state", bool, "Import sessions that this server has not signed."),
    ("ray", bool, "Run replicas on Ray Serve [off]."),
    ("ray_address", str, "Ray cluster to join; without it one is started on this machine."),
    ("replicas", str, "Number of replicas on Ray, or MIN-MAX to scale with the load [1]."),
    ("log_format", str, "Format of the log: text or json [text]."),
    ("log_level", str, "Level of the log: debug, info, warning or error [info]."),
    ("access_log", bool, "Log one line for each request [off]."),
    ("otel_endpoint", str, "OpenTelemetry collector for traces, such as http://host:4318."),
)


def serve(**flags: Any) -> None:
    """Serve a model over HTTP and WebSockets. Each flag is also an EVERSTREAM_* variable."""
    gc.disable()  # objects of imports and loading are never garbage
    from server.config import ServerConfig
    from server.http.server import bind, with_fitting_connections
    from server.http.server import serve as serve_app
    from server.observability.logs import configure as configure_logs
    from server.observability.tracing import TracingError, open_tracer

    try:
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        config = ServerConfig.load(**given | lists)
        configure_logs(
            config.log_format, config.log_level.upper(), keys=(*config.api_keys, *config.admin_keys)
        )
        if config.ray:
            raise typer.Exit(_serve_on_ray(config))
        config = with_fitting_connections(config)
        tracer = open_tracer(config.otel_endpoint, version())
        listener = bind(config.host, config.port)
    except (ConfigError, TracingError) as error:
        raise fail(error) from error
    except OSError as error:
        address = f"{config.host}:{config.port}"
        reason = (error.strerror or str(error)).partition(" (while")[0]
        more = "; --port takes another one" if error.errno == errno.EADDRINUSE else ""
        raise fail(f"cannot listen on {address}: {reason}{more}") from error
    with listener:
        fastapi_app, models = _build(config, tracer)
        greet(config, models, listener.getsockname()[1])
        gc.freeze()
        gc.enable()
        exit_code = serve_app(fastapi_app, config, listener)
    tracer.close()
    raise typer.Exit(exit_code)


def _parameter(name: str, kind: Any, help_text: str) -> Parameter:
    option = typer.Option(None, flag_of(name), help=help_text)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


#: Typer reads the command line by this signature.
serve.__signature__ = Signature(list(starmap(_parameter, FLAGS)))  # type: ignore[attr-defined]


def _build(config: ServerConfig, tracer: Tracer) -> tuple[FastAPI, Models]:
    """The application and its models; an error that the user can fix is exit code 2."""
    from server.api.app import create_app
    from server.api.auth import KeysFileError
    from server.errors import RequestError
    from server.models.build import build_models
    from server.store.base import StoreError

    try:
        models, builder = build_models(config, tracer, _shared(config))
        return create_app(models, config, version(), tracer, builder), models
    except KeysFileError as error:
        raise fail(f"--keys-file: {error}") from error
    except StoreError as error:
        raise fail(f"--store: {error}") from error
    except RequestError as error:
        raise fail(error.message) from error


def _shared(config: ServerConfig) -> Shared | None:
    """Opens a store that replicas share. A missing package is one error line."""
    if not config.is_shared:
        return None
    try:
        from server.cluster.shared import Cluster
    except ImportError as error:
        raise fail(
            f"--store: {error.name} is missing: pip install 'everstream[postgres]'"
        ) from error
    return Cluster(config)


def _serve_on_ray(config: ServerConfig) -> int:
    """Returns the exit code. Needs what the extra `ray` brings."""
    gc.enable()
    from server.cluster.ray.cluster import RayError
    from server.cluster.ray.cluster import serve as serve_on_ray

    def greet(port: int) -> None:
        many = "1 replica" if config.replicas == "1" else f"{config.replicas} replicas"
        typer.echo(f"Everstream serves on Ray: {many}.\n")
        invite(config, port)

    try:
        return serve_on_ray(config, greet)
    except RayError as error:
        raise fail(error) from error
