"""``everstream store``: check, compact, export and back up what a server has stored."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.options import clear_errors, fail
from server.store.base import DiskFiles, Identity, Loaded, StoreError, create
from server.store.sqlite.database import DATABASE_FILE, Waiting, signing_key
from server.store.sqlite.database import owner as owner_of_lock
from server.store.sqlite.maintenance import (
    back_up,
    newest_identity,
    owner_and_identity,
    problems,
    renew_id,
    stores_in,
    sync_tree,
)
from server.store.sqlite.store import SqliteStore, open_store
from server.store.states import export_session
from server.store.table_store import StoreLimits

if TYPE_CHECKING:
    from server.engine.session import SessionValue


# ``everstream store``: check, compact and export what a server has stored.


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
    from server.engine.kept import replay
    from server.engine.session import Session
    from server.engine.text import Detokenizer

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
    if not (path / DATABASE_FILE).is_file():
        inside = ", ".join(str(store) for store in stores_in(path))
        hint = (
            f"name one of the stores in it: {inside}" if inside else f"there is no {DATABASE_FILE}"
        )
        raise fail(f"{path} has no store: {hint}")


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# -------------------------------------------------------------------------------------------------
# ``everstream store backup`` and ``new-id``: copies of a server's stores, and what they become.


def backup_command(
    path: Store,
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="Folder to create; it must not exist.")
    ],
) -> None:
    """Copy a folder of sessions to a new one; the server may run.

    It has the store of each model as of one moment, and is on the disk when the command ends. It
    keeps the id of the original: see `store new-id`.
    """
    path, new = path.absolute(), new.absolute()
    stores = _stores(path)
    if new.exists():
        raise fail(f"{new} exists: name a folder that does not")
    if path in new.parents:
        raise fail(f"{new} is inside of {path}: name a folder elsewhere")
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{new.name}.", suffix=".partial", dir=new.parent))
    except OSError as error:
        raise fail(f"{new} cannot be made: {error.strerror}") from error
    try:
        num_lost = sum(_back_up(store, partial / store.relative_to(path)) for store in stores)
        sync_tree(partial)
        num_bytes = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        partial.rename(new)
        DiskFiles().sync_dir(new.parent)
    except (OSError, StoreError) as error:
        raise fail(f"{path} cannot be copied: {reason(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    typer.echo(f"{new}: {num_bytes} bytes; start a server with --store {new}")
    if num_lost:
        typer.echo(f"everstream: {num_lost} states are missing in {path}", err=True)
        raise typer.Exit(1)


def new_id_command(path: Store) -> None:
    """Make a copied store another one; the server must not run.

    Clients that come with a cursor of the original get `reset` and read their sessions again.
    """
    stores = _stores(path)
    for store in stores:
        if (process := owner_of_lock(store)) is not None:
            raise fail(f"process {process} has the store {store}: stop it first")
    try:
        for store in stores:
            typer.echo(f"{store}: {renew_id(store)}")
    except (OSError, StoreError) as error:
        raise fail(f"{path} cannot get another id: {reason(error)}") from error


def _back_up(store: Path, new: Path) -> int:
    """How many states of the store were missing."""
    new.mkdir(mode=0o700, parents=True, exist_ok=True)
    width = 0

    def note(line: str) -> None:
        nonlocal width
        if sys.stderr.isatty():
            typer.echo(f"\r{line:<{width}}", nl=False, err=True)
            width = len(line)

    copied = back_up(store, new, note)
    if width:
        typer.echo("\r" + " " * width + "\r", nl=False, err=True)
    typer.echo(f"{store}: {copied.num_sessions} sessions, {copied.num_states} states")
    for file in copied.lost:
        typer.echo(f"{store}: the state {file} is missing")
    return len(copied.lost)


def _stores(path: Path) -> list[Path]:
    stores = stores_in(path)
    if not stores:
        raise fail(f"{path} has no store; for PostgreSQL see docs/operate/backup.md")
    return stores
