"""A module's command in namespaces of its own: ``python -m tests.reliability.confined``.

``--tmpfs PATH SIZE MODULE ARGUMENTS``: with a small file system of its own at PATH,
which ends with the process. The process keeps its id. Needs Linux, and a user who
may make namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MOUNT = 'mount -t tmpfs -o size="$2" tmpfs "$1" && shift 2 && exec "$@"'


def unshare(*namespaces: str) -> list[str]:
    """The beginning of a command in namespaces of its own."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, *namespaces]


def can(*namespaces: str) -> bool:
    """Whether this machine lets this user have them, and mount something there."""
    command = [*unshare("--mount", *namespaces), "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def inside(pid: int, path: Path) -> Path:
    """``path`` as the process ``pid`` sees it."""
    return Path(f"/proc/{pid}/root") / path.relative_to("/")


def main() -> None:
    flag, path, size, *module = sys.argv[1:]
    assert flag == "--tmpfs", flag
    command = [*unshare("--mount"), "sh", "-c", MOUNT, "sh", path, size]
    os.execvp(command[0], [*command, sys.executable, "-m", *module])


if __name__ == "__main__":
    main()
