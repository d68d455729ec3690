"""What several commands share: errors as one line, and the options that name weight changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def errors_as_lines(*more: type[Exception]) -> Iterator[None]:
    """Turns errors that the user can fix into one line on stderr and exit status 2.

    They are those of a model's files, and ``more``.
    """
    from model.files import FileError

    kinds: tuple[type[Exception], ...] = (FileError, UnicodeDecodeError, *more)
    try:
        yield
    except kinds as error:
        typer.echo(f"everstream: {error}", err=True)
        raise typer.Exit(2) from error
