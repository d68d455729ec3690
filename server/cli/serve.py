"""``everstream serve``. Each flag is a setting of `server.config.settings.ServerConfig`."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.failures import fail
from server.cli.greeting import greet, invite
from server.cli.options import TokenizerFile, version

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.config.settings import ServerConfig
    from server.models.registry import Models
    from server.models.storage import Shared
    from server.observability.tracing import Tracer


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder, .pth or .gguf file, bundled model or hub id; NAME=PATH for several"
            " [everstream-stories]."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file of settings, named as variables are."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model [its folder's name].")
    ] = None,
    tokenizer: TokenizerFile = None,
    model_dir: Annotated[
        Path | None, typer.Option(help="Folder from which models may be loaded at run time.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(help="State that sessions begin with, as NAME=FILE or MODEL/NAME=FILE."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one [8000].")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, native or torch [auto].")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the model [all cores, or 1 on torch].")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights: auto, float32, bfloat16 or int8 [auto].")
    ] = None,
    reasoning: Annotated[
        str | None,
        typer.Option(help="Thinking in chats: on, off, or its most tokens [as the template says]."),
    ] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Sessions that fit the pool.")] = None,
    state_memory: Annotated[
        str | None, typer.Option(help="Size of the pool instead, such as 2GiB [512MiB].")
    ] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Requests that may wait [256].")] = None,
    session_ttl_s: Annotated[
        float | None,
        typer.Option("--session-ttl", help="Seconds until an idle session expires [900]."),
    ] = None,
    api_keys: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="Key that clients must send; repeat for more."),
    ] = None,
    admin_keys: Annotated[
        list[str] | None,
        typer.Option("--admin-key", help="Key that may also administer; repeat for more."),
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="TOML file of keys with names, scopes and limits.")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", help="Foreign page that may call in; repeat for more."),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="Name by which clients reach it, where it has no keys; repeat for more.",
        ),
    ] = None,
    drain_timeout_s: Annotated[
        float | None,
        typer.Option("--drain-timeout", help="Seconds that running requests get at the end [10]."),
    ] = None,
    retire_timeout_s: Annotated[
        float | None,
        typer.Option(
            "--retire-timeout", help="Seconds that streams of a replaced model get [3600]."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Folder of the sessions, postgresql://URL, or memory [the user's state folder]."
        ),
    ] = None,
    durability: Annotated[
        str | None, typer.Option(help="full: survives a power cut; relaxed: a kill [full].")
    ] = None,
    store_size: Annotated[str | None, typer.Option(help="Most that the store may hold.")] = None,
    retention_s: Annotated[
        float | None,
        typer.Option("--retention", help="Seconds until an unused session is deleted [30 days]."),
    ] = None,
    sleep_memory: Annotated[
        str | None, typer.Option(help="For sessions that have lost their slot [256MiB].")
    ] = None,
    prefix_cache: Annotated[
        str | None, typer.Option(help="For the states of prompts, 0 for none [64MiB].")
    ] = None,
    prefix_disk: Annotated[
        str | None, typer.Option(help="For those that memory does not hold, in the store [0].")
    ] = None,
    max_detached_tokens: Annotated[
        int | None, typer.Option(help="Tokens that a session generates without its client [4096].")
    ] = None,
    continue_on_start: Annotated[
        bool | None,
        typer.Option("--continue-on-start", help="Continue what ran when the server stopped."),
    ] = None,
    trust_unsigned_state: Annotated[
        bool | None,
        typer.Option("--trust-unsigned-state", help="Import sessions without a signature."),
    ] = None,
    ray: Annotated[
        bool | None, typer.Option("--ray", help="Serve by replicas on Ray Serve [off].")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join; else one is started here.")
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(help="On Ray: how many, or MIN-MAX to follow the load [1].")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json [text].")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error [info].")
    ] = None,
    access_log: Annotated[
        bool | None, typer.Option("--access-log", help="Log a line for each request [off].")
    ] = None,
    otel_endpoint: Annotated[
        str | None, typer.Option(help="Where OpenTelemetry traces go, such as http://host:4318.")
    ] = None,
) -> None:
    """Serve a model over HTTP and WebSockets. Each flag is also an EVERSTREAM_* variable."""
    flags = {name: tuple(v) if isinstance(v, list) else v for name, v in locals().items()}
    _serve({name: value for name, value in flags.items() if value not in (None, ())})


def _serve(flags: dict[str, Any]) -> None:
    """Serves by ``flags``, which are named as the settings are. Raises `typer.Exit`."""
    gc.disable()  # what imports and loading make stays
    from server.config.errors import ConfigError
    from server.config.settings import ServerConfig
    from server.http.descriptors import with_fitting_connections
    from server.http.server import bind
    from server.http.server import serve as serve_app
    from server.observability.logs import configure as configure_logs
    from server.observability.tracer import TracingError, open_tracer

    try:
        config = ServerConfig.load(**flags)
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


def _build(config: ServerConfig, tracer: Tracer) -> tuple[FastAPI, Models]:
    """The application and its models; what cannot be served is a message and exit code 2."""
    from server.api.app import create_app
    from server.api.auth.keys_file import KeysFileError
    from server.errors import RequestError
    from server.models.factory import build_models
    from server.store.errors import StoreError

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
    """What opens a store that others have as well. A missing package is a message."""
    if not config.is_shared:
        return None
    try:
        from server.cluster.cluster import Cluster
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
