"""The options of commands that name files of weight changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from model.checkpoint_files import Lora

LoraFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--lora", help="LoRA or MiSS file, or folder of peft, to merge in; repeat for more."
    ),
]
LoraAlpha = Annotated[
    float | None,
    typer.Option("--lora-alpha", min=1e-9, help="Alpha of LoRA files that do not state theirs."),
]


def lora_of(files: list[Path] | None, alpha: float | None) -> Lora:
    """What the two options name."""
    if alpha is not None and not files:
        raise typer.BadParameter("needs --lora", param_hint="--lora-alpha")
    return Lora(tuple(files or ()), alpha)
