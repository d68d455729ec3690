"""The command ``everstream``. Its commands are in files of their own: see `server.cli.commands`."""

from __future__ import annotations

from typing import Annotated

import typer

from server.cli import options
from server.cli.commands import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The entry point of the command ``everstream``."""
    app()


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"everstream {options.version()}")
        raise typer.Exit


@app.callback()
def everstream(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None:
    """Tokens for ever, at constant memory."""


if __name__ == "__main__":
    main()
