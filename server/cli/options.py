"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

BackendName = Literal["auto", "native", "torch"]
Dtype = Literal["auto", "float32", "bfloat16", "int8"]
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


def version() -> str:
    """Of the installed package."""
    from importlib import metadata

    return metadata.version("everstream")
