"""The command ``everstream chat``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import httpx
import typer
from rich.console import Console

from clients.api_key import ApiKey
from clients.chat.chat_answer import MAX_AWAY_S
from clients.chat.conversation import Conversation
from clients.chat.kept import NotKept, chat_file
from clients.python import Client, EverstreamError

#: For the connection and for each event, as in the Python client.
TIMEOUT_S = 60.0
STATE_HOME = "~/.local/state"


def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model of the server; default: its first.", show_default=False),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Continue text also with a model that answers messages.")
    ] = False,
    session: Annotated[
        str | None,
        typer.Option(
            help="Keep the conversation under this name, and continue it if there is one.",
            show_default=False,
        ),
    ] = None,
    state_home: Annotated[
        str,
        typer.Option(
            help="Folder of conversations that are kept.", envvar="XDG_STATE_HOME", hidden=True
        ),
    ] = STATE_HOME,
) -> None:
    """Chat with a running server in the terminal.

    A model with a chat template answers messages, others continue the text. A conversation
    can be rewound, forked into branches, saved and loaded.
    """
    console = Console(highlight=False)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    with (
        _client(url, api_key) as client,
        httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as http,
    ):
        try:
            kept = None if session is None else chat_file(session, state_home or STATE_HOME)
            with kept or contextlib.nullcontext() as file:
                talk = Conversation(client, console, model, None if text else http, file)
                talk.run(_lines(console))
        except (EverstreamError, NotKept, OSError) as error:
            typer.echo(f"everstream: {error}", err=True)
            raise typer.Exit(1) from error


def _client(url: str, api_key: str | None) -> Client:
    try:
        return Client(url, api_key, reconnect_s=MAX_AWAY_S)
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
