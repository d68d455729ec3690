"""The packages of the Durable Streams protocol: its client, what pages use, and its own checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from benchmarks import sse
from tests.compat.conftest import serving
from tests.compat.environments import Client, node_client
from tests.docs.pages import page
from tests.reliability.servers import STUCK_S, ServerProcess

KEY = {"authorization": "Bearer usual"}
START = "0" * 16
#: A turn of 500 tokens parks before its end, and has one after a restart.
PAUSES = ("--max-detached-tokens", 300, "--continue-on-start")


@pytest.fixture(scope="module")
def client() -> Client:
    return node_client("durable")


def api(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=KEY, timeout=STUCK_S)


@pytest.mark.timeout(400)
def test_client_and_transports_pass_their_checks(
    client: Client, environment: dict[str, str]
) -> None:
    files = sorted(path.name for path in client.folder.glob("check_*.mjs"))
    options = ("--test", "--test-reporter=tap", "--test-concurrency=1")
    output = client.run(*options, *files, timeout_s=300, **environment)
    assert re.search(r"^# pass [1-9]", output, re.MULTILINE), output
    assert "# skipped 0" in output, output


@pytest.mark.timeout(400)
def test_client_follows_a_turn_over_a_kill_of_the_server(client: Client, tmp_path: Path) -> None:
    with ExitStack() as open_until_end:
        server = open_until_end.enter_context(serving(tmp_path, *PAUSES))
        session = begin(server, max_tokens=500)
        told = {"EVERSTREAM_URL": server.url, "SESSION": session, "TURN": START}
        followers = [
            open_until_end.enter_context(client.running("follow.mjs", LIVE=live, **told))
            for live in ("sse", "long-poll")
        ]
        begun = [messages_up_to(lines, 220) for lines in followers]
        server.restart()
        for lines, first in zip(followers, begun, strict=True):
            *rest, head = [json.loads(line) for line in lines]
            assert head == {"streamClosed": True, "isEnd": True}
            messages = [*first, *(message for batch in rest for message in batch)]
            assert [message["seq"] for message in messages[1:]] == [*range(1, 502)]
            assert messages[-1]["finish_reason"] == "length"
            text = "".join(message["text"] for message in messages)
            assert text == text_of(server, session)


def test_examples_of_the_page_show_the_stream(client: Client, server: ServerProcess) -> None:
    session = begin(server, max_tokens=20)
    text = page("durable-streams.md")
    curls = re.findall(r"(?m)^    (curl .*)$", text)
    (script,) = re.findall(r"(?ms)^```js\n(.*?)^```", text)
    assert curls
    for line in curls:
        command = here(line, server, session).replace("curl ", "exec curl -H 'api-key: usual' ")
        with printed(client, "bash", "-c", command) as lines:
            assert any("Once upon a time" in line for line in lines)
    command = ("node", "--input-type=module", "--eval", here(script, server, session))
    with printed(client, *command) as lines:
        assert next(lines).endswith(" input Once upon a time\n")


@contextmanager
def printed(client: Client, *command: str) -> Iterator[IO[str]]:
    """What a command prints that would go on; it is killed at the end."""
    environment = {**os.environ, "EVERSTREAM_KEY": "usual"}
    with subprocess.Popen(
        command, cwd=client.folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def here(example: str, server: ServerProcess, session: str) -> str:
    assert "http://127.0.0.1:8000" in example
    assert "sess_..." in example
    return example.replace("http://127.0.0.1:8000", server.url).replace("sess_...", session)


def begin(server: ServerProcess, max_tokens: int) -> str:
    """A session that generates, and whose client has left it."""
    body = {"prompt": "Once upon a time", "keep": True, "ignore_eos": True, "stream": True}
    with (
        api(server) as http,
        http.stream("POST", "/v1/completions", json={**body, "max_tokens": max_tokens}) as answer,
    ):
        first = next(sse.read_blocking(answer.iter_bytes()))
        session: str = first.value["session"]
        return session


def messages_up_to(lines: Iterator[str], num: int) -> list[dict[str, Any]]:
    """At least ``num`` messages of those that come."""
    found: list[dict[str, Any]] = []
    while len(found) < num:
        found += json.loads(next(lines))
    return found


def text_of(server: ServerProcess, session: str) -> str:
    with api(server) as http:
        parts = http.get(f"/v1/sessions/{session}/text").json()["parts"]
        return "".join(part["text"] for part in parts)


@pytest.mark.timeout(400)
def test_reading_part_of_the_conformance_suite_passes(client: Client, tmp_path: Path) -> None:
    wanted = [
        line
        for line in (client.folder / "conformance.txt").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    pattern = "^(" + "|".join(re.escape(name) for name in wanted) + ")$"
    report = tmp_path / "report.json"
    with serving(tmp_path, "--allow-origin", "https://example.com") as server:
        client.run(
            *("node_modules/vitest/vitest.mjs", "run", "conformance.test.mjs", "-t", pattern),
            *("--reporter=json", f"--outputFile={report}", "--testTimeout=120000"),
            timeout_s=300,
            EVERSTREAM_URL=server.url,
        )
    results = [
        each
        for file in json.loads(report.read_text())["testResults"]
        for each in file["assertionResults"]
    ]
    passed = [each["fullName"] for each in results if each["status"] == "passed"]
    assert sorted(passed) == sorted(wanted)
