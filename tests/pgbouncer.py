"""A real PgBouncer of a test's own, from Debian's package, in transaction mode."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.postgres import USER, Postgres
from tests.requirements import needs_program, program
from tests.reserved_port import ReservedPort

PROGRAM = program("pgbouncer")
needs_pgbouncer = needs_program("pgbouncer")

#: What a server may have open at the database behind it, however many come.
POOL_SIZE = 4


class PgBouncer:
    """In front of ``postgres``; it refuses to run as root, and does as the user ``postgres``."""

    def __init__(self, postgres: Postgres) -> None:
        assert PROGRAM is not None
        self._dir = Path(tempfile.mkdtemp(prefix="everstream-pgbouncer-"))
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        config = self._dir / "pgbouncer.ini"
        (self._dir / "users").write_text(f'"{USER}" ""\n')
        config.write_text(
            f"[databases]\n* = host=127.0.0.1 port={postgres.port} user={USER}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nauth_type = trust\n"
            f"auth_file = {self._dir}/users\npool_mode = transaction\nunix_socket_dir =\n"
            f"default_pool_size = {POOL_SIZE}\nignore_startup_parameters = extra_float_digits\n"
        )
        as_user = ["-u", "postgres"] if os.geteuid() == 0 else []
        if as_user:
            for path in (self._dir, *self._dir.iterdir()):
                shutil.chown(path, "postgres")
        self._log = (self._dir / "log").open("w+")
        self._process = subprocess.Popen(
            [PROGRAM, *as_user, str(config)], stdout=self._log, stderr=self._log
        )
        while not self._takes_connections():
            assert self._process.poll() is None, (self._dir / "log").read_text()

    def url(self, database_url: str) -> str:
        """The way through it to a database of ``postgres``."""
        database = database_url.rpartition("/")[2]
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def close(self) -> None:
        self._process.kill()  # what its signals mean differs from release to release
        self._process.wait(120)
        self._log.close()
        self._reserved.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _takes_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=60).close()
        except OSError:
            return False
        return True
