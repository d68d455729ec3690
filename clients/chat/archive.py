"""A branch as one file: the session as the server signed it, and what was said."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path

from clients.chat.branch import Branch, Turn
from clients.python import Client

SESSION, TURNS = "session", "turns.json"
#: A file that claims to hold more is none of ours.
MAX_BYTES = 1 << 30


class NotAnArchive(ValueError):
    """A file that `save` has not written."""


def save(branch: Branch, path: Path) -> None:
    """Writes the branch, whole or not at all. Raises OSError."""
    part = path.with_name(path.name + ".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(SESSION, branch.session.export())
        archive.writestr(TURNS, json.dumps([asdict(turn) for turn in branch.turns]))
    part.replace(path)


def load(client: Client, path: Path) -> Branch:
    """The branch of a file, in a new session. Raises OSError and `NotAnArchive`."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
                raise NotAnArchive(f"{path} is too large")
            data = archive.read(SESSION)
            turns = [Turn(**turn) for turn in json.loads(archive.read(TURNS))]
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise NotAnArchive(f"{path} is no saved conversation") from error
    return Branch(client.import_session(data), turns)
