"""The command line, and the only place where config, engine and app are put together.

Heavy imports happen inside the commands, so that ``everstream --help`` is quick.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.commands import Commands

if TYPE_CHECKING:
    from fastapi import FastAPI

    from model.checkpoint import Checkpoint
    from server.api.model_info import ModelInfo
    from server.backend import Backend
    from server.config import ServerConfig

BUNDLED_MODEL = Path(__file__).parent.parent / "model" / "bundled"
BUNDLED_NAME = "everstream-stories"
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
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Foreign page that may call in; repeat for more.")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests get at the end [10].")
    ] = None,
) -> None:
    """Serve a model over HTTP and WebSockets. Each flag is also an EVERSTREAM_* variable."""
    gc.disable()  # what imports and loading make stays
    from server.config import ConfigError, ServerConfig
    from server.serving import bind
    from server.serving import serve as serve_app

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it writes two lines per WebSocket
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
            allowed_origins=tuple(allow_origin) if allow_origin else None,
            drain_timeout_s=drain_timeout,
        )
        listener = bind(config.host, config.port)
    except ConfigError as error:
        raise _fail(error) from error
    except OSError as error:
        address = f"{config.host}:{config.port}"
        raise _fail(f"cannot listen on {address}: {error.strerror}") from error
    with listener:
        fastapi_app, info, name = build_app(config)
        _greet(config, info, name, listener.getsockname()[1])
        gc.freeze()
        gc.enable()
        raise typer.Exit(serve_app(fastapi_app, config, listener))


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


def build_app(config: ServerConfig) -> tuple[FastAPI, ModelInfo, str]:
    """Loads the model and puts engine, driver and application around it; names the backend."""
    from server.api.app import create_app
    from server.driver import Driver
    from server.engine.engine import EngineConfig
    from server.metrics import Metrics

    with _clear_errors():
        checkpoint = load_model(config.model)
        num_sessions = _num_sessions(checkpoint, config)
        backend = open_model(checkpoint, config.backend, config.dtype, config.threads)
    limits = EngineConfig(
        new_id=lambda: f"sess_{secrets.token_hex(16)}",
        max_waiting=config.max_waiting,
        session_ttl_s=config.session_ttl_s,
    )
    try:
        engine = backend.engine(num_sessions, limits)
    except OSError as error:
        raise _fail(f"--state-memory: {num_sessions} sessions: {error.strerror}") from error
    info = _model_info(checkpoint, backend, config, num_sessions)
    driver = Driver(engine, time.monotonic, Metrics())
    return create_app(driver, backend.tokenizer, info, config, _version()), info, backend.name


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

    return ModelInfo(
        name=Path(config.model).name if config.model else BUNDLED_NAME,
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
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.api_keys else ""
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

    try:
        yield
    except (BackendError, CheckpointError, ConfigError, TokenizerError) as error:
        raise _fail(error) from error


def _fail(message: object) -> typer.Exit:
    typer.echo(f"everstream: {message}", err=True)
    return typer.Exit(2)


if __name__ == "__main__":
    main()
