"""Names of models on the hub: ``OWNER/NAME[@REVISION][:FILE]``.

Parts of a name become parts of paths, so each is checked here. Imports nothing slow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from model.weights import CheckpointError

#: What a revision is where none is given: the branch.
MAIN = "main"
COMMIT = r"[0-9a-f]{40}"
_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[^:]*))?(?::(?P<file>.*))?",
    re.ASCII | re.DOTALL,
)
#: In no name of a repository. What ends like a file is a path with a mistake in it.
_IMPOSSIBLE = re.compile(r"\.\.|--|\.(pth|gguf|safetensors)$")


@dataclass(frozen=True)
class HubName:
    """A repository, a revision of it (branch, tag or commit), and one file where it has several."""

    repository: str
    revision: str = MAIN
    file: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repository}{revision}{'' if self.file is None else f':{self.file}'}"

    @property
    def short(self) -> str:
        """The last part of the name, as of a path."""
        return PurePosixPath(self.file or self.repository).name


def parse_name(text: str) -> HubName | None:
    """The name in ``text``; None where it has not the form of one.

    Raises `CheckpointError` for a revision or a file that cannot be in a repository.
    """
    match = _NAME.fullmatch(text)
    if match is None or _IMPOSSIBLE.search(match["repository"]):
        return None
    revision, file = match["revision"], match["file"]
    if revision is not None and not is_safe_path(revision):
        raise CheckpointError(f"{text}: {revision!r} is not a revision of a repository")
    if file is not None and not is_safe_path(file):
        raise CheckpointError(f"{text}: {file!r} is not a file of a repository")
    return HubName(match["repository"], revision or MAIN, file)


def is_safe_path(path: str) -> bool:
    """Whether ``path`` is relative, stays below its folder, and is written in one way only."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)
