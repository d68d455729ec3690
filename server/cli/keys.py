"""``everstream key``: a new key for a tenant, shown once."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, get_args

import typer

from server.api.auth import ANYONE, NAME_PATTERN, Scope, digest_of

PREFIX = "es-"
NUM_BYTES = 32
DEFAULT_SCOPES = ("generate", "sessions", "read")


def key_command(
    name: Annotated[str, typer.Argument(help="Tenant of the key.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Scope: {', '.join(get_args(Scope))}; repeat for more"
            f" [{', '.join(DEFAULT_SCOPES)}]."
        ),
    ] = None,
) -> None:
    """Make a key. Prints its entry for the keys file on stdout and the key on stderr.

    ``everstream key alice >> keys.toml`` adds the entry and shows the key.
    """
    scopes = tuple(dict.fromkeys(scope or DEFAULT_SCOPES))
    if name == ANYONE or not re.fullmatch(NAME_PATTERN, name):
        raise typer.BadParameter(
            "a name has 1 to 63 of a-z, 0-9, '.', '_' and '-'", param_hint="NAME"
        )
    if unknown := sorted(set(scopes) - set(get_args(Scope))):
        raise typer.BadParameter(f"there is no scope {unknown[0]!r}", param_hint="--scope")
    key = PREFIX + secrets.token_urlsafe(NUM_BYTES)
    typer.echo(f"The key of {name}, which is shown this once:\n{key}", err=True)
    typer.echo(table(name, key, scopes))


def table(name: str, key: str, scopes: tuple[str, ...]) -> str:
    """The ``[[key]]`` of a keys file, which has the key's hash."""
    quoted = ", ".join(f'"{scope}"' for scope in scopes)
    digest = digest_of(key).hex()
    return f'\n[[key]]\nname = "{name}"\nhash = "sha256:{digest}"\nscopes = [{quoted}]'
