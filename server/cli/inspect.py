"""``everstream inspect``: a model's parameters and the memory of a session."""

from __future__ import annotations

from typing import Annotated

import typer

from model.command_line import LoraAlpha, LoraFiles, lora_of
from server.cli.failures import clear_errors
from server.cli.options import TokenizerFile


def inspect(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .pth, .st or .gguf file, bundled model or hub id.")
    ] = None,
    tokenizer: TokenizerFile = None,
    lora: LoraFiles = None,
    lora_alpha: LoraAlpha = None,
) -> None:
    """Show a model's parameters and the memory of a session.

    For comparison it also shows the memory of a KV cache of the same shape.
    """
    from rich.console import Console

    from model.bundled_models import DEFAULT_MODEL
    from server.cli import inspection

    changes = lora_of(lora, lora_alpha)
    with clear_errors():
        inspection.inspect(model or str(DEFAULT_MODEL), Console(), tokenizer, changes)
