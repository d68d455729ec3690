"""A branch as one file: the turns, and the session, signed by the server, where there is one."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path

from clients.chat.branch import Branch, Turn
from clients.chat.chat_branch import ChatBranch
from clients.chat.text_branch import TextBranch

SESSION, TURNS, SYSTEM = "session", "turns.json", "system.txt"
#: Maximum uncompressed size; `save` does not write larger files.
MAX_BYTES = 1 << 30


class NotAnArchive(ValueError):
    """The file was not written by `save`, or for another kind of model."""


def save(branch: Branch, path: Path) -> None:
    """Writes the branch atomically. Raises OSError."""
    part = path.with_name(path.name + ".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        if isinstance(branch, TextBranch):
            archive.writestr(SESSION, branch.session.export())
        elif isinstance(branch, ChatBranch):
            archive.writestr(SYSTEM, branch.system)
        archive.writestr(TURNS, json.dumps([asdict(turn) for turn in branch.turns]))
    part.replace(path)


def load(into: Branch, path: Path) -> Branch:
    """The branch of a file, of the kind and model of ``into``. Raises OSError, `NotAnArchive`."""
    member = SESSION if isinstance(into, TextBranch) else SYSTEM
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
                raise NotAnArchive(f"{path} is too large")
            if TURNS in archive.namelist() and member not in archive.namelist():
                raise NotAnArchive(f"{path} is of a model that " + _KINDS[member])
            data = archive.read(member)
            turns = [Turn(**turn) for turn in json.loads(archive.read(TURNS))]
            system = "" if member == SESSION else data.decode()
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        if isinstance(error, NotAnArchive):
            raise
        raise NotAnArchive(f"{path} is not a saved conversation") from error
    if isinstance(into, TextBranch):
        session = into.client.import_session(data)
        return TextBranch(into.client, into.model, session, turns)
    assert isinstance(into, ChatBranch), into
    return ChatBranch(into.http, into.model, turns, system, into.effort)


#: Of the file's model, by the member that is missing.
_KINDS = {SESSION: "answers messages; this one continues text", SYSTEM: "continues text"}
