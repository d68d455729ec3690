"""The command line, and the only place where config, engine and app are put together.

Heavy imports happen inside the commands, so that ``everstream --help`` is quick.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli import chat
from model.convert import cli as convert_cli
from model.training import cli as training_cli

if TYPE_CHECKING:
    import torch
    from fastapi import FastAPI

    from model.checkpoint import Checkpoint
    from server.api.model_info import ModelInfo
    from server.config import ServerConfig

BUNDLED_MODEL = Path(__file__).parent.parent / "model" / "bundled"
BUNDLED_NAME = "everstream-stories"
DEFAULT_STATE_MEMORY_BYTES = 512 << 20

app = typer.Typer(
    help="Tokens for ever, at constant memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
training_cli.register(app)
convert_cli.register(app)
app.command()(chat)

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
    threads: Annotated[int | None, typer.Option(help="Threads of the matrix library [1].")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16 [auto].")] = None,
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
        fastapi_app, info = build_app(config)
        _greet(config, info, listener.getsockname()[1])
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
    threads: Annotated[int, typer.Option(help="Threads of the matrix library.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
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
        summary = run(load_model(model, dtype, threads), prompt, sampling, write)
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


def build_app(config: ServerConfig) -> tuple[FastAPI, ModelInfo]:
    """Loads the model and puts engine, driver and application around it."""
    from server.api.app import create_app
    from server.driver import Driver
    from server.engine.engine import Engine, EngineConfig
    from server.metrics import Metrics

    checkpoint = load_model(config.model, config.dtype, config.threads)
    info = _model_info(checkpoint, config)
    engine = Engine(
        checkpoint,
        EngineConfig(
            max_sessions=info.max_sessions,
            new_id=lambda: f"sess_{secrets.token_hex(16)}",
            max_waiting=config.max_waiting,
            session_ttl_s=config.session_ttl_s,
        ),
    )
    driver = Driver(engine, time.monotonic, Metrics())
    return create_app(driver, checkpoint.tokenizer, info, config, _version()), info


def load_model(source: str | None, dtype: str, threads: int) -> Checkpoint:
    """The checkpoint, on ``threads`` threads; leaves with a message where it cannot be had."""
    import torch

    from model.checkpoint import load_checkpoint
    from server.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(threads)
    with _clear_errors():
        return load_checkpoint(source or BUNDLED_MODEL, _torch_dtype(dtype))


def _torch_dtype(name: str) -> torch.dtype:
    """bfloat16 for ``auto`` where the processor multiplies it natively."""
    import torch

    if name == "auto":
        name = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _model_info(checkpoint: Checkpoint, config: ServerConfig) -> ModelInfo:
    from model.state import StateLayout, kv_cache_bytes_per_token
    from server.api.model_info import ModelInfo

    with _clear_errors():
        state_bytes = StateLayout.of(checkpoint.config).num_bytes
    memory = config.state_memory or DEFAULT_STATE_MEMORY_BYTES
    max_sessions = config.max_sessions or memory // state_bytes
    if max_sessions < 1:
        raise _fail(f"--state-memory: one session takes {state_bytes} bytes")
    return ModelInfo(
        name=Path(config.model).name if config.model else BUNDLED_NAME,
        digest=checkpoint.digest,
        attention=checkpoint.config.attention,
        dtype=str(checkpoint.model.head_weight.dtype).removeprefix("torch."),
        parameters=checkpoint.model.num_parameters(),
        vocab_size=checkpoint.tokenizer.vocab_size,
        state_bytes_per_session=state_bytes,
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(checkpoint.config),
        max_sessions=max_sessions,
        created_s=int(time.time()),
    )


def _greet(config: ServerConfig, info: ModelInfo, port: int) -> None:
    """Says what runs, and prints a line that can be pasted to see tokens stream."""
    from server.inspection import format_bytes

    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{port}"
    body = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0.8, "stream": True}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.api_keys else ""
    typer.echo(
        f"Everstream serves {info.name}: {info.parameters / 1e6:.1f}M parameters, {info.attention},"
        f" {info.dtype}, on torch.\n"
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

    try:
        yield
    except (CheckpointError, ConfigError, TokenizerError) as error:
        raise _fail(error) from error


def _fail(message: object) -> typer.Exit:
    typer.echo(f"everstream: {message}", err=True)
    return typer.Exit(2)


if __name__ == "__main__":
    main()
