"""The API key option of the commands; the default is the server's own environment variable."""

from __future__ import annotations

from typing import Annotated

import typer

VARIABLES = ["EVERSTREAM_API_KEY", "EVERSTREAM_API_KEYS"]


def first_key(value: str | None) -> str | None:
    """The first key of a comma-separated list, which the server's variable may be; or None."""
    keys = [part.strip() for part in (value or "").split(",")]
    return next(filter(None, keys), None)


ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=VARIABLES,
        callback=first_key,
        help="API key, if the server requires one.",
    ),
]
