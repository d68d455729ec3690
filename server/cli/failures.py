"""Errors that the user can fix: one line on standard error and exit code 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from model.files import one_line


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turns a failed load of a model or a refused request into a message and exit code 2."""
    from model.checkpoint import CheckpointError
    from model.config import ConfigError
    from model.tokenizer import TokenizerError
    from server.errors import RequestError
    from server.models.backend import BackendError

    try:
        yield
    except (BackendError, CheckpointError, ConfigError, RequestError, TokenizerError) as error:
        raise fail(error) from error


def fail(message: object) -> typer.Exit:
    """Prints ``message``; raise what it returns."""
    lines = (one_line(line) for line in str(message).split("\n"))
    typer.echo("everstream: " + "\n".join(lines), err=True)
    return typer.Exit(2)
