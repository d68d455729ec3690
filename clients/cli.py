"""``everstream chat``: a story in the terminal, in one kept session on a running server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from clients.python import Client, ConnectionLost, EverstreamError, Session, SessionNotFound
from clients.python.protocol import Sampling

HELP = """\
Write, and the model goes on from there; an empty line lets it go on by itself. Ctrl-C stops it.
  /new            start afresh
  /temp NUMBER    temperature
  /top-p NUMBER   top-p
  /tokens NUMBER  tokens per answer
  /seed NUMBER    fix the seed; /seed alone draws a new one each time
  /help, /quit"""

#: command -> the sampling option that it sets, and how its argument is read.
_SETTINGS = {
    "/temp": ("temperature", float),
    "/top-p": ("top_p", float),
    "/tokens": ("max_tokens", int),
    "/seed": ("seed", int),
}


def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="EVERSTREAM_API_KEY")] = None,
) -> None:
    """Write a story together with a running server."""
    console = Console(highlight=False)
    with Client(url, api_key) as client:
        try:
            Chat(client, console).run(_lines(console))
        except EverstreamError as error:
            console.print(f"everstream: {error}", style="red")
            raise typer.Exit(1) from error


class Chat:
    """One conversation: a session and the options for its next answers."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client = client
        self._console = console
        self._model = client.models()[0]
        self.session: Session = client.create_session()
        self._sampling: Sampling = {"max_tokens": 120, "temperature": 0.8, "top_p": 0.95}

    def run(self, lines: Iterator[str]) -> None:
        """Obeys one line after another until they end or one says /quit."""
        self._console.print(f"{self._model['id']}, /help for help", style="dim")
        for line in lines:
            if line.strip() == "/quit":
                break
            try:
                if line.startswith("/"):
                    self._command(line.split())
                else:
                    self._answer(line)
            except SessionNotFound:
                self._console.print("the session has expired; /new begins another", style="red")
            except ConnectionLost:
                raise
            except EverstreamError as error:
                self._console.print(f"{error}", style="red", markup=False)
        self._forget()

    def _forget(self) -> None:
        """Frees the session's slot, unless it has expired."""
        with contextlib.suppress(SessionNotFound):
            self.session.delete()

    def _command(self, words: list[str]) -> None:
        name, *arguments = words
        if name == "/new":
            self._forget()
            self.session = self._client.create_session()
            self._console.print("a new session", style="dim")
        elif name in _SETTINGS and self._set(name, arguments):
            self._console.print(f"{dict(self._sampling)}", style="dim")
        else:
            self._console.print(HELP, style="dim")

    def _set(self, name: str, arguments: list[str]) -> bool:
        option, read = _SETTINGS[name]
        if name == "/seed" and not arguments:
            self._sampling.pop("seed", None)
            return True
        try:
            (text,) = arguments
            self._sampling[option] = read(text)  # type: ignore[literal-required]
        except ValueError:
            return False
        return True

    def _answer(self, prompt: str) -> None:
        started_s = time.perf_counter()
        generation = self.session.generate(prompt, **self._sampling)
        with contextlib.suppress(KeyboardInterrupt), generation:  # leaving the block cancels
            for event in generation:
                self._console.out(printable(event.text), end="", highlight=False)
        elapsed_s = time.perf_counter() - started_s
        finished = generation.finished
        assert finished is not None
        state_kib = self._model["everstream"]["state_bytes_per_session"] / 1024
        cache_kib = self._model["everstream"]["kv_cache_bytes_per_token"] * finished.position / 1024
        self._console.print(
            f"\n{finished.usage.completion_tokens / elapsed_s:.0f} tokens/s,"
            f" position {finished.position},"
            f" state {state_kib:.0f} KiB (a KV cache: {cache_kib:,.0f} KiB)",
            style="dim",
        )


def printable(text: str) -> str:
    """``text`` without what would steer the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _lines(console: Console) -> Iterator[str]:
    """The lines of standard input, with a prompt where a person types them."""
    while True:
        try:
            if sys.stdin.isatty():
                yield console.input("[bold]> [/bold]")
            else:
                yield input()
        except (EOFError, KeyboardInterrupt):
            return
