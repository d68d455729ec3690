"""The fake server, which gets another SIGTERM while its interpreter ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys

from tests import fake_server

if __name__ == "__main__":
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    sys.exit(fake_server.main())
