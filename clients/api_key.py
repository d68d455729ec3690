"""The key of a command: a flag, or what the server itself would read from the environment."""

from __future__ import annotations

from typing import Annotated

import typer

VARIABLES = ["EVERSTREAM_API_KEY", "EVERSTREAM_API_KEYS"]


def first_key(value: str | None) -> str | None:
    """The first of several with commas between them, as the server's variable may have; or None."""
    keys = [part.strip() for part in (value or "").split(",")]
    return next(filter(None, keys), None)


ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar=VARIABLES, callback=first_key, help="Key, if the server wants one."
    ),
]
