"""Writes a story as it comes: the shortest program with a session that is kept.

A connection that ends is not seen. Ctrl-C stops the generation, on the server too,
and ``--session`` continues from there another time.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from clients.api_key import ApiKey
from clients.python import Client, EverstreamError, Sampling


def main(
    prompt: Annotated[str, typer.Argument(help="Its beginning.")] = "Once upon a time",
    tokens: Annotated[int, typer.Option(min=1, help="How long it becomes.")] = 200,
    session: Annotated[
        str | None, typer.Option(help="Go on with this one.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes it.", show_default=False)] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Write a story by a running server, and say how to continue with it."""
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
            print(f"\n\nGo on with --session {kept.id}")
    except EverstreamError as error:
        typer.echo(f"story: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
