"""Options that several commands have, and errors that the user can fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from model.files import one_line

BackendName = Annotated[
    Literal["auto", "native", "torch"], typer.Option("--backend", help="Runtime of the model.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", help="Number of threads of the model [all cores, or 1 on torch].", min=1
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "int8", "int4"],
    typer.Option("--dtype", help="Type of the weights."),
]
StateDtype = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option("--state-dtype", help="Type of the sums in a session's state."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Folder, .pth, .st or .gguf file, bundled model or hub id [everstream-stories].",
        show_default=False,
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="Tokenizer file, if it is not in the model's folder."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=32,
        help="Tokens of the past that attention layers, or the longest window, keep.",
    ),
]
PastMode = Annotated[
    Literal["stop", "slide"],
    typer.Option("--past", help="At that bound texts stop, or old tokens slide out."),
]


def version() -> str:
    """Of the installed package."""
    from importlib import metadata

    return metadata.version("everstream")


# -------------------------------------------------------------------------------------------------
# Errors that the user can fix: one line on standard error and exit code 2.


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turns a failed load of a model or a refused request into a message and exit code 2."""
    from model.checkpoint import CheckpointError
    from model.config import ConfigError
    from model.tokenizer import TokenizerError
    from server.errors import RequestError
    from server.models.backend import BackendError

    try:
        yield
    except (BackendError, CheckpointError, ConfigError, RequestError, TokenizerError) as error:
        raise fail(error) from error


def fail(message: object) -> typer.Exit:
    """Prints ``message``; raise what it returns."""
    lines = (one_line(line) for line in str(message).split("\n"))
    typer.echo("everstream: " + "\n".join(lines), err=True)
    return typer.Exit(2)
