"""A branch as one file: the session, signed by the server, and the turns of the conversation."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path

from clients.chat.branch import Branch, Turn
from clients.python import Client

SESSION, TURNS = "session", "turns.json"
#: Maximum uncompressed size; `save` does not write larger files.
MAX_BYTES = 1 << 30


class NotAnArchive(ValueError):
    """The file was not written by `save`."""


def save(branch: Branch, path: Path) -> None:
    """Writes the branch atomically. Raises OSError."""
    part = path.with_name(path.name + ".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(SESSION, branch.session.export())
        archive.writestr(TURNS, json.dumps([asdict(turn) for turn in branch.turns]))
    part.replace(path)


def load(client: Client, path: Path) -> Branch:
    """Loads the branch of a file into a new session. Raises OSError and `NotAnArchive`."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
                raise NotAnArchive(f"{path} is too large")
            data = archive.read(SESSION)
            turns = [Turn(**turn) for turn in json.loads(archive.read(TURNS))]
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise NotAnArchive(f"{path} is not a saved conversation") from error
    return Branch(client.import_session(data), turns)
