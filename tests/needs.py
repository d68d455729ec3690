"""Which tests need more than this process, and a guard that each of them says so by its marker.

Most say it themselves; those that get a database or a browser from a fixture, and all tests of
some folders, are marked here. `make test` runs those that need nothing more and are not slow
(`unit`), and some that were picked by hand (`SMOKE`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

#: The markers of such tests; see pyproject.toml.
MARKERS = ("process", "browser", "database", "package")

#: Folders in which every test has the marker.
FOLDERS = {
    "benchmarks": "process",
    "browser": "browser",
    "chaos": "process",
    "clients": "process",
    "compat": "package",
    "deploy": "process",
    "fuzz": "process",
    "model/convert": "slow",
    "model/training": "slow",
    "reliability": "process",
    "security": "process",
    "server/cluster": "process",
    "server/cluster/ray": "package",
    "soak": "process",
}

#: Fixtures whose tests have the marker.
FIXTURES = {
    "browser": "browser",
    "postgres": "database",
}

#: Whole ways through the server, for `make test`: a kill and a resume, one way for each API, client
#: and page, one move between replicas.
SMOKE = {
    "browser/test_chat.py": "test_answer_is_whole_and_the_thinking_is_folded_away",
    "browser/test_page.py": "test_streams_the_text_after_the_prompt",
    "clients/javascript/test_node.py": "test_client_handles_every_scripted_answer",
    "clients/test_asynchronous.py": "test_many_generations_over_one_socket",
    "clients/test_chat.py": "test_session_continues_until_new",
    "clients/test_synchronous.py": "test_session_keeps_its_state_between_requests",
    "compat/test_open_webui.py": "test_chat_is_streamed_with_all_settings",
    "compat/test_openai_python.py": "test_the_python_package_passes_its_checks",
    "docs/test_first_chat.py": "test_commands_lead_to_a_response_that_continues_after_a_kill",
    "reliability/test_01_kill_and_resume.py": (
        "test_every_transcript_of_the_bundled_model_is_whole_after_kills"
    ),
    "reliability/test_09_same_request_twice.py": (
        "test_result_of_a_crashed_server_is_returned_after_it"
    ),
    "reliability/test_12_store_lost.py": "test_sessions_continue_after_the_store_is_back",
    "server/api/anthropic/test_messages.py": "test_stream_puts_together_to_the_whole_answer",
    "server/cluster/test_moves.py": "test_detached_stream_continues_at_another_replica",
    "server/test_native_start.py": "test_tokens_come_without_torch",
    "server/test_served_file.py": "test_gguf_writes_the_text_of_the_native_file",
    "test_imports.py": "test_native_way_imports_nothing_slow",
}

#: What the interpreter reports before it starts a process.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}

#: matplotlib asks it for the fonts of a machine on which it has no list of them yet.
ALLOWED = "fc-list"


def mark(items: Iterable[pytest.Item]) -> None:
    """Adds the markers of folders and fixtures."""
    for item in items:
        for folder in item.path.relative_to(TESTS).parents:
            if folder.as_posix() in FOLDERS:
                item.add_marker(FOLDERS[folder.as_posix()])
        for name in getattr(item, "fixturenames", ()):
            if name in FIXTURES:
                item.add_marker(FIXTURES[name])
        if not is_marked(item) and not item.get_closest_marker("slow"):
            item.add_marker("unit")
        if SMOKE.get(item.path.relative_to(TESTS).as_posix()) == item.name.partition("[")[0]:
            item.add_marker("smoke")


def is_marked(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in MARKERS)


class Guard:
    """Fails a test without a marker of `MARKERS` that starts a process."""

    def __init__(self) -> None:
        self._started: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event in STARTS and args[:1] != (ALLOWED,):
            self._started.append(f"{event} {args[:2]}")

    def begin(self) -> None:
        """What was started before is no test's."""
        self._started.clear()

    def check(self, item: pytest.Item) -> None:
        """Raises `pytest.fail.Exception` where the test has started a process unannounced."""
        if self._started and not is_marked(item):
            pytest.fail(
                f"starts a process and has none of the markers {', '.join(MARKERS)}: "
                f"{self._started[0]}",
                pytrace=False,
            )
