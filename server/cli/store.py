"""``everstream store``: check, salvage, compact and export what a server has stored."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.failures import clear_errors, fail
from server.store.base import Identity, Loaded
from server.store.errors import StoreError
from server.store.files import create
from server.store.portable import export_session
from server.store.saving import StoreLimits
from server.store.sqlite.backup import stores_in
from server.store.sqlite.check import problems
from server.store.sqlite.database import FILE_NAME
from server.store.sqlite.lock import Waiting
from server.store.sqlite.lock import owner as owner_of_lock
from server.store.sqlite.reader import newest_identity, num_sessions, owner_and_identity
from server.store.sqlite.salvage import salvage
from server.store.sqlite.signing import signing_key
from server.store.sqlite.store import SqliteStore, open_store

if TYPE_CHECKING:
    from server.engine.value import SessionValue

Store = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the store.")]

_ANY = Identity("", "", "", "", 0, "")


def check_command(path: Store) -> None:
    """List the problems of a store; the server may run."""
    _must_exist(path)
    found = 0
    try:
        for problem in problems(path):
            typer.echo(problem)
            found += 1
    except StoreError as error:
        typer.echo(f"{path}: {reason(error)}")
        found += 1
    if found:
        typer.echo(f"everstream: {found} problem{'s' if found > 1 else ''} in {path}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{path}: whole")


def salvage_command(
    path: Store,
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="Folder to create; it must not exist.")
    ],
) -> None:
    """Copy what is readable in a damaged store to a new one.

    Prints what was lost. The damaged store does not change; the server must not run.
    """
    if not (path / FILE_NAME).is_file():
        raise fail(f"{path} has no {FILE_NAME}: without it nothing is known of any session")
    if (process := owner_of_lock(path)) is not None:
        raise fail(f"process {process} has the store {path}: stop it first")
    if new.exists():
        raise fail(f"{new} exists: name a folder that does not")
    num_lost = 0
    try:
        for line in salvage(path, new):
            typer.echo(line)
            num_lost += 1
        num_kept = num_sessions(new)
    except (OSError, StoreError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise fail(f"nothing can be read of {path / FILE_NAME}: {reason(error)}") from error
    typer.echo(f"{new}: {num_kept} sessions; start the server with --store {new}")
    raise typer.Exit(1 if num_lost else 0)


def compact_command(
    path: Store,
    retention: Annotated[
        float | None,
        typer.Option(help="Delete sessions that were unused for this many seconds of serving."),
    ] = None,
    max_log_tokens: Annotated[
        int, typer.Option(help="Maximum tokens of each session's log; older ones are dropped.")
    ] = StoreLimits.max_log_tokens,
) -> None:
    """Delete data that is no longer needed; the server must not run."""
    _must_exist(path)
    before = _num_bytes(path)
    limits = StoreLimits(retention_s=retention, max_log_tokens=max_log_tokens)
    with clear_errors():
        identity = newest_identity(path) or _ANY
    store = _opened(path, identity, limits)
    try:
        store.compact()
    except StoreError as error:
        raise fail(error) from error
    finally:
        store.close()
    typer.echo(f"{path}: {before} bytes before, {_num_bytes(path)} now")


def export_command(
    path: Store,
    session: Annotated[str, typer.Argument(help="Id of the session.")],
    output: Annotated[Path, typer.Argument(help="File to write.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of the session; needed if its state was not saved when the server stopped."
        ),
    ] = None,
) -> None:
    """Write a session to a signed file; the server must not run."""
    _must_exist(path)
    with clear_errors():
        with_owner = owner_and_identity(path, session)
    if with_owner is None:
        raise fail(f"{path} has no session {session}")
    owner, identity = with_owner
    store = _opened(path, identity, StoreLimits())
    try:
        value = _present(store.load(session, owner), model)
    except StoreError as error:
        raise fail(error) from error
    finally:
        store.close()
    with os.fdopen(create(output), "wb") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)  # one that was there may have had other rights
        file.write(export_session(value, identity, signing_key(path)))
    typer.echo(f"{output}: {value.length} tokens of text, {output.stat().st_size} bytes")


def _present(loaded: Loaded, model: str | None) -> SessionValue:
    """The session after the last entry of its log."""
    if not loaded.entries:
        return replace(loaded.value, progress=None)
    if model is None:
        from model.bundled_models import bundled_models

        raise fail(
            "the session has continued since it was saved: name its model, --model FOLDER "
            f"(bundled: {', '.join(bundled_models())})"
        )
    from model.checkpoint import load_tokenizer
    from server.engine.detokenizer import Detokenizer
    from server.engine.replay import replay
    from server.engine.session import Session

    with clear_errors():
        tokenizer = load_tokenizer(model)
    session = Session.of(loaded.value, Detokenizer(tokenizer), 0.0)
    replay(session, loaded.value.progress, loaded.entries)
    return session.value(loaded.value.state)


def _opened(path: Path, identity: Identity, limits: StoreLimits) -> SqliteStore:
    try:
        return open_store(path, identity, limits=limits, waiting=Waiting())
    except StoreError as error:
        raise fail(error) from error


def reason(error: Exception) -> str:
    """What was wrong, in SQLite's own words where it was SQLite that failed."""
    return (isinstance(error, StoreError) and error.detail) or str(error)


def _must_exist(path: Path) -> None:
    if str(path).startswith(("postgresql:", "postgres:")):
        raise fail(
            "this command is for the store of one machine, a folder; see docs/operate/postgresql.md"
        )
    if path.is_file():
        raise fail(f"{path} is a file: give its folder")
    if not (path / FILE_NAME).is_file():
        inside = ", ".join(str(store) for store in stores_in(path))
        hint = f"name one of the stores in it: {inside}" if inside else f"there is no {FILE_NAME}"
        raise fail(f"{path} has no store: {hint}")


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
