"""Of two who make the same thing, one waits."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.exclusive import exclusive


def test_second_waits_until_the_first_is_done(tmp_path: Path) -> None:
    done = []

    def second() -> None:
        with exclusive(tmp_path):
            done.append("second")

    thread = threading.Thread(target=second)
    with exclusive(tmp_path):
        thread.start()
        thread.join(0.1)
        done.append("first")
    thread.join()
    assert done == ["first", "second"]
