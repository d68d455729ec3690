"""The command line.

Heavy imports happen inside the commands, so that ``everstream --help`` is quick.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import secrets
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.cli.commands import Commands
from server.engine.sampling_defaults import DEFAULTS

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.config.settings import ServerConfig
    from server.models.registry import Models
    from server.models.storage import Shared
    from server.observability.tracing import Tracer

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

BackendName = Literal["auto", "native", "torch"]
Dtype = Literal["auto", "float32", "bfloat16", "int8"]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Folder, .pth or .gguf file, bundled model or hub id [everstream-stories].",
        show_default=False,
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="Tokenizer's file, where the model's is elsewhere."),
]


#: The last thing that is printed before the server answers, so that it stays on the screen.
OPEN_WARNING = """\
****************************************************************************
WARNING: this server has no API key and listens on {host}.
Whoever reaches this address may use it, and read and delete every session.
Give it a key:       EVERSTREAM_API_KEY=... (or --api-key, --keys-file)
Or keep it private:  --host 127.0.0.1, or a container port published there
****************************************************************************
"""


def main() -> None:
    """The entry point of the command ``everstream``."""
    app()


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"everstream {_version()}")
        raise typer.Exit


@app.callback()
def everstream(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None:
    """Tokens for ever, at constant memory."""


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder, .pth or .gguf file, bundled model or hub id; NAME=PATH for several"
            " [everstream-stories]."
        ),
    ] = None,
    config_file: Annotated[
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
    session_ttl: Annotated[
        float | None, typer.Option(help="Seconds until an idle session expires [900].")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; repeat for more.")
    ] = None,
    admin_key: Annotated[
        list[str] | None, typer.Option(help="Key that may also administer; repeat for more.")
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="TOML file of keys with names, scopes and limits.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Foreign page that may call in; repeat for more.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Name by which clients reach it, where it has no keys; repeat for more."),
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests get at the end [10].")
    ] = None,
    retire_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that streams of a replaced model get [3600]."),
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
    retention: Annotated[
        float | None, typer.Option(help="Seconds until an unused session is deleted [30 days].")
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
        int | None, typer.Option(help="Tokens that a session goes on without its client [4096].")
    ] = None,
    continue_on_start: Annotated[
        bool | None,
        typer.Option("--continue-on-start", help="Go on with what ran when the server went down."),
    ] = None,
    trust_unsigned_state: Annotated[
        bool | None,
        typer.Option("--trust-unsigned-state", help="Import sessions that nobody has signed."),
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
    gc.disable()  # what imports and loading make stays
    from server.config.settings import ConfigError, ServerConfig
    from server.http.descriptors import with_fitting_connections
    from server.http.server import bind
    from server.http.server import serve as serve_app
    from server.observability.logs import configure as configure_logs
    from server.observability.tracer import TracingError, open_tracer

    try:
        config = ServerConfig.load(
            model=tuple(model) if model else None,
            config=config_file,
            served_model_name=served_model_name,
            tokenizer=tokenizer,
            model_dir=model_dir,
            state=tuple(state) if state else None,
            host=host,
            port=port,
            backend=backend,
            threads=threads,
            dtype=dtype,
            reasoning=reasoning,
            max_sessions=max_sessions,
            state_memory=state_memory,
            max_waiting=max_waiting,
            session_ttl_s=session_ttl,
            api_keys=tuple(api_key) if api_key else None,
            admin_keys=tuple(admin_key) if admin_key else None,
            keys_file=keys_file,
            allowed_origins=tuple(allow_origin) if allow_origin else None,
            allowed_hosts=tuple(allow_host) if allow_host else None,
            drain_timeout_s=drain_timeout,
            retire_timeout_s=retire_timeout,
            ray=ray,
            ray_address=ray_address,
            replicas=replicas,
            store=store,
            durability=durability,
            store_size=store_size,
            retention_s=retention,
            sleep_memory=sleep_memory,
            prefix_cache=prefix_cache,
            prefix_disk=prefix_disk,
            max_detached_tokens=max_detached_tokens,
            continue_on_start=continue_on_start,
            trust_unsigned_state=trust_unsigned_state,
            log_format=log_format,
            log_level=log_level,
            access_log=access_log,
            otel_endpoint=otel_endpoint,
        )
        configure_logs(
            config.log_format, config.log_level.upper(), keys=(*config.api_keys, *config.admin_keys)
        )
        if config.ray:
            raise typer.Exit(_serve_on_ray(config))
        config = with_fitting_connections(config)
        tracer = open_tracer(config.otel_endpoint, _version())
        listener = bind(config.host, config.port)
    except (ConfigError, TracingError) as error:
        raise _fail(error) from error
    except OSError as error:
        address = f"{config.host}:{config.port}"
        reason = (error.strerror or str(error)).partition(" (while")[0]
        more = "; --port takes another one" if error.errno == errno.EADDRINUSE else ""
        raise _fail(f"cannot listen on {address}: {reason}{more}") from error
    with listener:
        fastapi_app, models = _build(config, tracer)
        _greet(config, models, listener.getsockname()[1])
        gc.freeze()
        gc.enable()
        exit_code = serve_app(fastapi_app, config, listener)
    tracer.close()
    raise typer.Exit(exit_code)


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to go on with; - or none reads standard input.", show_default=False
        ),
    ] = None,
    model: Model = None,
    tokenizer: TokenizerFile = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = DEFAULTS.temperature,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = DEFAULTS.top_k,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = DEFAULTS.top_p,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = DEFAULTS.min_p,
    repetition_penalty: Annotated[
        float, typer.Option(help="1 is off.")
    ] = DEFAULTS.repetition_penalty,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    backend: Annotated[BackendName, typer.Option(help="What runs the model.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads of the model [all cores, or 1 on torch].", min=1)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of weights.")] = "auto",
) -> None:
    """Generate in the terminal, without a server."""
    from server.cli.terminal import generate as run
    from server.engine.sampling_defaults import with_defaults
    from server.errors import RequestError
    from server.models.backend import open_backend
    from server.models.factory import load_model

    sampling = with_defaults(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=secrets.randbits(32) if seed is None else seed,
        max_tokens=max_tokens,
    )

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        with _clear_errors():
            opened = open_backend(load_model(model, tokenizer), backend, dtype, threads)
        summary = run(opened, _prompt(prompt), sampling, write)
    except KeyboardInterrupt:
        typer.echo()
        raise
    except RequestError as error:
        raise _fail(error) from error
    typer.echo(f"\n\n{summary}", err=True)


@app.command()
def inspect(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .pth or .gguf file, bundled model or hub id.")
    ] = None,
    tokenizer: TokenizerFile = None,
) -> None:
    """Show a model's parameters and the memory of a session.

    Beside it stands what a KV cache of the same shape would need.
    """
    from rich.console import Console

    from model.bundled_models import DEFAULT_MODEL
    from server.cli import inspection

    with _clear_errors():
        inspection.inspect(model or str(DEFAULT_MODEL), Console(), tokenizer)


def _prompt(given: str | None) -> str:
    """The argument, or what standard input has where nobody types; a last line end is no part."""
    try:
        if given == "-" or (given is None and not sys.stdin.isatty()):
            return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        (given or "").encode("utf-8")
    except UnicodeError as error:
        raise _fail("the prompt is not UTF-8") from error
    return given or ""


def _build(config: ServerConfig, tracer: Tracer) -> tuple[FastAPI, Models]:
    """The application and its models; what cannot be served is a message and exit code 2."""
    from server.api.app import create_app
    from server.api.auth.keys_file import KeysFileError
    from server.errors import RequestError
    from server.models.factory import build_models
    from server.store.errors import StoreError

    try:
        models, builder = build_models(config, tracer, _shared(config))
        return create_app(models, config, _version(), tracer, builder), models
    except KeysFileError as error:
        raise _fail(f"--keys-file: {error}") from error
    except StoreError as error:
        raise _fail(f"--store: {error}") from error
    except RequestError as error:
        raise _fail(error.message) from error


def _shared(config: ServerConfig) -> Shared | None:
    """What opens a store that others have as well. A missing package is a message."""
    if not config.is_shared:
        return None
    try:
        from server.cluster.cluster import Cluster
    except ImportError as error:
        raise _fail(
            f"--store: {error.name} is missing: pip install 'everstream[postgres]'"
        ) from error
    return Cluster(config)


def _greet(config: ServerConfig, models: Models, port: int) -> None:
    """Says what runs, and how to see it."""
    from server.cli.inspection import format_bytes

    for version in models.versions:
        info, backend = version.service.model, version.service.transfer.identity.backend
        where = "on torch" if backend == "torch" else "on the native runtime"
        typer.echo(
            f"Everstream serves {info.name}: {info.parameters / 1e6:.1f}M parameters,"
            f" {info.attention}, {info.dtype}, {where}.\n"
            f"{info.max_sessions:,} sessions of {format_bytes(info.state_bytes_per_session)} each,"
            " at token ten and at token ten million.\n"
        )
    _invite(config, port)


def _serve_on_ray(config: ServerConfig) -> int:
    """Returns the exit code. Needs what the extra `ray` brings."""
    gc.enable()
    from server.cluster.ray.cluster import RayError
    from server.cluster.ray.cluster import serve as serve_on_ray

    def greet(port: int) -> None:
        many = "1 replica" if config.replicas == "1" else f"{config.replicas} replicas"
        typer.echo(f"Everstream serves on Ray: {many}.\n")
        _invite(config, port)

    try:
        return serve_on_ray(config, greet)
    except RayError as error:
        raise _fail(error) from error


def _openable(host: str) -> str:
    """``host`` as a browser takes it; for one that means all addresses, the loopback's."""
    with contextlib.suppress(ValueError):
        address = ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"[{host}]" if ":" in host else host


def _invite(config: ServerConfig, port: int) -> None:
    """Prints a line that can be pasted to see tokens stream."""
    from model.bundled_models import DEFAULT_NAME, bundled_models

    url = f"http://{_openable(config.host)}:{port}"
    body = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.wants_key else ""
    typer.echo(
        f"Open {url}/ or paste:\n\n"
        f"  curl -N {url}/v1/completions {key}-H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'\n"
    )
    others = [name for name in bundled_models() if name != DEFAULT_NAME]
    if config.model[0].source is None and others:
        typer.echo(f"Also bundled: {', '.join(others)} (--model NAME, repeated for several)\n")
    if config.is_open:
        typer.echo(OPEN_WARNING.format(host=config.host), err=True)
        logging.getLogger("everstream").warning("no API key, and listening on %s", config.host)


def _version() -> str:
    from importlib.metadata import version

    return version("everstream")


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """A model that cannot be loaded is a message and exit code 2, not a traceback."""
    from model.checkpoint import CheckpointError
    from model.config import ConfigError
    from model.tokenizer import TokenizerError
    from server.models.backend import BackendError

    try:
        yield
    except (BackendError, CheckpointError, ConfigError, TokenizerError) as error:
        raise _fail(error) from error


def _fail(message: object) -> typer.Exit:
    typer.echo(f"everstream: {message}", err=True)
    return typer.Exit(2)


if __name__ == "__main__":
    main()
