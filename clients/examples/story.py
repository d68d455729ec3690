"""Prints a story as it is generated: the shortest program that uses a kept session.

The client reconnects if the connection is lost. Ctrl-C stops the generation, also on
the server, and ``--session`` continues it later.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from clients.api_key import ApiKey
from clients.python import Client, EverstreamError, Sampling


def main(
    prompt: Annotated[str, typer.Argument(help="Beginning of the story.")] = "Once upon a time",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 200,
    session: Annotated[
        str | None, typer.Option(help="Id of the session to continue.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling.", show_default=False)
    ] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Generate a story on a running server, and print how to continue it."""
    sampling: Sampling = {"max_tokens": tokens}
    if seed is not None:
        sampling["seed"] = seed
    try:
        with Client(url, api_key) as client:
            kept = client.create_session() if session is None else client.session(session)
            if session is None:
                print(prompt, end="")
            story = kept.generate(prompt if session is None else "", **sampling)
            with story, contextlib.suppress(KeyboardInterrupt):
                for event in story:
                    print(event.text, end="", flush=True)
            print(f"\n\nContinue with --session {kept.id}")
    except EverstreamError as error:
        typer.echo(f"story: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
