"""A conversation in a file, by name, for the next ``everstream chat --session NAME``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clients.chat.branch import Asked, Turn

NAME = re.compile(r"\w[\w.-]{0,99}")


class NotKept(ValueError):
    """The name, or the file that it stands for, cannot be used; the message says why."""


@dataclass
class KeptBranch:
    """A branch: of a text with the id of its ``session``, of a chat with its ``system`` message."""

    turns: list[Turn] = field(default_factory=list)
    session: str | None = None
    system: str = ""


@dataclass
class KeptChat:
    """All that a later process needs to continue: ``asked`` is the prompt without an answer yet."""

    model: str
    branches: dict[str, KeptBranch]
    active: str
    effort: str | None = None
    asked: Asked | None = None


class ChatFile:
    """The file of one conversation. Only one process has it at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> KeptChat | None:
        """What was saved last; None for a new name. Raises OSError, `NotKept`."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise NotKept(f"{self._path} is not a conversation") from error
        try:
            return _chat_of(kept)
        except (TypeError, KeyError, AttributeError) as error:
            raise NotKept(f"{self._path} is not a conversation of this version") from error

    def save(self, chat: KeptChat) -> None:
        """Replaces the file atomically. Raises OSError."""
        part = self._path.with_name(self._path.name + ".part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(chat), file)
        part.replace(self._path)


@contextlib.contextmanager
def chat_file(name: str, state_home: str) -> Iterator[ChatFile]:
    """The file of this name, for one process at a time. Raises OSError, `NotKept`.

    ``state_home`` is where the user's programs keep their state.
    """
    if not NAME.fullmatch(name):
        raise NotKept(f"{name!r} is no name: letters, digits, dots, - and _, at most 100")
    place = Path(state_home).expanduser() / "everstream" / "chats"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(place / f"{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotKept(f"another everstream chat has the conversation {name}") from None
        yield ChatFile(place / f"{name}.json")


def _chat_of(kept: dict[str, Any]) -> KeptChat:
    branches = {
        name: KeptBranch([Turn(**turn) for turn in branch.pop("turns")], **branch)
        for name, branch in kept.pop("branches").items()
    }
    asked = kept.pop("asked")
    return KeptChat(branches=branches, asked=asked and Asked(**asked), **kept)
