"""The command ``everstream chat``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from clients.api_key import ApiKey
from clients.chat.conversation import Conversation
from clients.python import Client, EverstreamError


def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model of the server; default: its first.", show_default=False),
    ] = None,
) -> None:
    """Chat with a running server in the terminal.

    A conversation can be rewound, forked into branches, saved and loaded.
    """
    console = Console(highlight=False)
    with _client(url, api_key) as client:
        try:
            Conversation(client, console, model).run(_lines(console))
        except EverstreamError as error:
            typer.echo(f"everstream: {error}", err=True)
            raise typer.Exit(1) from error


def _client(url: str, api_key: str | None) -> Client:
    try:
        return Client(url, api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _lines(console: Console) -> Iterator[str]:
    """Yields the lines of standard input, with a prompt if it is a terminal."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - from here on lines can be edited and recalled
    while True:
        try:
            if sys.stdin.isatty():
                yield console.input("[bold]> [/bold]")
            else:
                yield input()
        except (EOFError, KeyboardInterrupt):
            return
