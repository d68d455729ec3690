"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
        help="Tokens of the past that attention layers keep, for models with some [by memory].",
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
