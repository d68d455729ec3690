"""``everstream store backup`` and ``new-id``: copies of a server's stores, and what they become."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from server.cli.failures import fail
from server.cli.store import Store, reason
from server.store.errors import StoreError
from server.store.files import DiskFiles
from server.store.sqlite.backup import back_up, renew_id, stores_in, sync_tree
from server.store.sqlite.lock import owner as owner_of_lock


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
