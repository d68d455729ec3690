from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.stopping import _states, stop

pytestmark = pytest.mark.process

#: Says numbers as fast as it can, from several threads.
BUSY = """
import itertools, threading
def count():
    for number in itertools.count():
        print(number, flush=True)
for _ in range(4):
    threading.Thread(target=count).start()
"""


def test_stopped_process_does_nothing_more() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stop(process.pid)
        assert set(_states(process.pid)) == {"T"}
        process.send_signal(signal.SIGKILL)
        process.stdout.read()
