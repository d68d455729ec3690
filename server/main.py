"""The command line, and the only place where config, engine and app are put together.

Heavy imports happen inside the commands, so that ``everstream --help`` is quick.
"""

from __future__ import annotations

import contextlib
import gc
import json
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.commands import Commands
from server.tracing import OFF, Tracer

if TYPE_CHECKING:
    from fastapi import FastAPI

    from model.checkpoint import Checkpoint
    from server.api.model_info import ModelInfo
    from server.backend import Backend
    from server.config import ServerConfig

BUNDLED_MODEL = Path(__file__).parent.parent / "model" / "bundled"
DEFAULT_STATE_MEMORY_BYTES = 512 << 20

app = typer.Typer(
    cls=Commands,
    help="Tokens for ever, at constant memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

BackendName = Literal["auto", "native", "torch"]
Dtype = Literal["auto", "float32", "bfloat16", "int8"]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Checkpoint folder or hub id; the bundled one if left out.",
        show_default=False,
    ),
]


def main() -> None:
    """The entry point of the command ``everstream``."""
    app()


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one [8000].")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, native or torch [auto].")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the model [all cores, or 1 on torch].")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights: auto, float32, bfloat16 or int8 [auto].")
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
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests get at the end [10].")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Folder of the durable sessions, or memory [the user's state folder]."),
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
    log_format: Annotated[str | None, typer.Option(help="text or json [text].")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error [info].")
    ] = None,
    otel_endpoint: Annotated[
        str | None, typer.Option(help="Where OpenTelemetry traces go, such as http://host:4318.")
    ] = None,
) -> None:
    """Serve a model over HTTP and WebSockets. Each flag is also an EVERSTREAM_* variable."""
    gc.disable()  # what imports and loading make stays
    from server.config import ConfigError, ServerConfig
    from server.logs import configure as configure_logs
    from server.serving import bind
    from server.serving import serve as serve_app
    from server.tracing import TracingError, open_tracer

    try:
        config = ServerConfig.load(
            model=model,
            host=host,
            port=port,
            backend=backend,
            threads=threads,
            dtype=dtype,
            max_sessions=max_sessions,
            state_memory=state_memory,
            max_waiting=max_waiting,
            session_ttl_s=session_ttl,
            api_keys=tuple(api_key) if api_key else None,
            admin_keys=tuple(admin_key) if admin_key else None,
            keys_file=keys_file,
            allowed_origins=tuple(allow_origin) if allow_origin else None,
            drain_timeout_s=drain_timeout,
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
            otel_endpoint=otel_endpoint,
        )
        configure_logs(
            config.log_format, config.log_level.upper(), keys=(*config.api_keys, *config.admin_keys)
        )
        tracer = open_tracer(config.otel_endpoint, _version())
        listener = bind(config.host, config.port)
    except (ConfigError, TracingError) as error:
        raise _fail(error) from error
    except OSError as error:
        address = f"{config.host}:{config.port}"
        raise _fail(f"cannot listen on {address}: {error.strerror}") from error
    with listener:
        fastapi_app, info, name = build_app(config, tracer)
        _greet(config, info, name, listener.getsockname()[1])
        gc.freeze()
        gc.enable()
        exit_code = serve_app(fastapi_app, config, listener)
    tracer.close()
    raise typer.Exit(exit_code)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on with.")] = "",
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: float = 0.95,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    backend: Annotated[BackendName, typer.Option(help="What runs the model.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads of the model [all cores, or 1 on torch].")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of weights.")] = "auto",
) -> None:
    """Generate in the terminal, without a server."""
    from server.engine.errors import EngineError
    from server.engine.types import SamplingParams
    from server.terminal import generate as run

    sampling = SamplingParams(
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
            opened = open_model(load_model(model), backend, dtype, threads)
        summary = run(opened, prompt, sampling, write)
    except EngineError as error:
        raise _fail(error) from error
    typer.echo(f"\n\n{summary}", err=True)


@app.command()
def inspect(
    model: Annotated[str | None, typer.Argument(help="Checkpoint folder or hub id.")] = None,
) -> None:
    """Parameters, bytes of state, and what a KV cache of the same shape would need."""
    from rich.console import Console

    from server import inspection

    with _clear_errors():
        inspection.inspect(model or str(BUNDLED_MODEL), Console())


def build_app(config: ServerConfig, tracer: Tracer = OFF) -> tuple[FastAPI, ModelInfo, str]:
    """Loads the model and puts engine, driver and application around it; names the backend."""
    from model.state import StateLayout
    from server.api.app import create_app
    from server.api.keys_file import KeysFileError
    from server.driver import Driver
    from server.engine.engine import EngineConfig
    from server.metrics import Metrics
    from server.storage import open_prefixes, open_storage

    with _clear_errors():
        checkpoint = load_model(config.model)
        num_sessions = _num_sessions(checkpoint, config)
        backend = open_model(checkpoint, config.backend, config.dtype, config.threads)
        store, signing = open_storage(config, checkpoint, backend)
    state_bytes = StateLayout.of(checkpoint.config).num_bytes
    limits = EngineConfig(
        new_id=lambda: f"sess_{secrets.token_hex(16)}",
        max_waiting=config.max_waiting,
        max_asleep=config.sleep_memory // state_bytes,
        session_ttl_s=config.session_ttl_s,
        can_evict=store.durable,
        save_interval=config.save_interval_tokens,
        max_detached_tokens=config.max_detached_tokens,
        max_prefixes=config.prefix_cache // state_bytes,
        max_evicted_prefixes=64 if config.prefix_disk else 0,
    )
    try:
        engine = backend.engine(num_sessions, limits)
    except OSError as error:
        raise _fail(f"--state-memory: {num_sessions} sessions: {error.strerror}") from error
    info = _model_info(checkpoint, backend, config, num_sessions)
    driver = Driver(engine, time.monotonic, Metrics(), store, tracer)
    prefixes = open_prefixes(config, checkpoint, backend, driver)
    try:
        app = create_app(
            driver, backend.tokenizer, info, config, _version(), signing, tracer, prefixes
        )
    except KeysFileError as error:
        raise _fail(f"--keys-file: {error}") from error
    return app, info, backend.name


def load_model(source: str | None) -> Checkpoint:
    """The checkpoint of a folder or a hub id, or the bundled one. Raises what loading raises."""
    from model.checkpoint import load_checkpoint

    return load_checkpoint(source or BUNDLED_MODEL)


def open_model(
    checkpoint: Checkpoint, backend: BackendName, dtype: str, threads: int | None
) -> Backend:
    """See `server.backend.open_backend`."""
    from server.backend import open_backend

    return open_backend(checkpoint, backend, dtype, threads)


def _num_sessions(checkpoint: Checkpoint, config: ServerConfig) -> int:
    from model.state import StateLayout

    state_bytes = StateLayout.of(checkpoint.config).num_bytes
    memory = config.state_memory or DEFAULT_STATE_MEMORY_BYTES
    num_sessions = config.max_sessions or memory // state_bytes
    if num_sessions < 1:
        raise _fail(f"--state-memory: one session takes {state_bytes} bytes")
    return num_sessions


def _model_info(
    checkpoint: Checkpoint, backend: Backend, config: ServerConfig, num_sessions: int
) -> ModelInfo:
    from model.state import StateLayout, kv_cache_bytes_per_token
    from model.weights import num_parameters
    from server.api.model_info import ModelInfo
    from server.config import model_name

    return ModelInfo(
        name=model_name(config.model),
        digest=checkpoint.digest,
        attention=checkpoint.config.attention,
        dtype=backend.dtype,
        parameters=num_parameters(checkpoint.config),
        vocab_size=backend.config.vocab_size,
        state_bytes_per_session=StateLayout.of(checkpoint.config).num_bytes,
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(checkpoint.config),
        max_sessions=num_sessions,
        created_s=int(time.time()),
    )


def _greet(config: ServerConfig, info: ModelInfo, backend: str, port: int) -> None:
    """Says what runs, and prints a line that can be pasted to see tokens stream."""
    from server.inspection import format_bytes

    where = "on torch" if backend == "torch" else "on the native runtime"
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{port}"
    body = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0.8, "stream": True}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.wants_key else ""
    typer.echo(
        f"Everstream serves {info.name}: {info.parameters / 1e6:.1f}M parameters, {info.attention},"
        f" {info.dtype}, {where}.\n"
        f"{info.max_sessions:,} sessions of {format_bytes(info.state_bytes_per_session)} each,"
        " at token ten and at token ten million.\n\n"
        f"Open {url}/ or paste:\n\n"
        f"  curl -N {url}/v1/completions {key}-H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'\n"
    )


def _version() -> str:
    from importlib.metadata import version

    return version("everstream")


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """A model that cannot be loaded is a message and exit code 2, not a traceback."""
    from model.checkpoint import CheckpointError
    from model.config import ConfigError
    from model.tokenizer import TokenizerError
    from server.backend import BackendError
    from server.store.errors import StoreError

    try:
        yield
    except (BackendError, CheckpointError, ConfigError, TokenizerError) as error:
        raise _fail(error) from error
    except StoreError as error:
        raise _fail(f"--store: {error.message}") from error


def _fail(message: object) -> typer.Exit:
    typer.echo(f"everstream: {message}", err=True)
    return typer.Exit(2)


if __name__ == "__main__":
    main()
