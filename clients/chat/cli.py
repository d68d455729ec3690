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
        str | None, typer.Option(help="One of the server's models [its first].", show_default=False)
    ] = None,
) -> None:
    """Write together with a running server.

    What was said can be taken back, branched off, saved and loaded.
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
    """The lines of standard input, with a prompt where a person types them."""
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
