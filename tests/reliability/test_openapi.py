"""Requests made from the OpenAPI document: no 500, and no answer that it does not describe.

The fuzzer is a process of its own, because the server's signals want this one's
main thread. It follows sessions that it has made through the other routes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.reliability.openapi_hooks import SEEN_FILE, SESSION_FILE, STATES
from tests.reliability.servers import ROOT, STUCK_S
from tests.server.harness import Running, running

KEY = "the-right-key"
OPEN = {"GET /health", "GET /ready"}
#: What the schema of a body allows is not always possible: a prompt may be missing, a session
#: short. A path with a parameter also matches the fixed path next to it, with other methods. And
#: a client with a cursor of another server is told so, also of a session that is gone.
LEFT_OUT = "positive_data_acceptance,allow_header_conformance,use_after_free"
#: They load from a folder that the operator names; tests/server/models has one.
NEEDS_A_FOLDER = {
    "POST /v1/admin/models",
    "POST /v1/admin/models/{name}/reload",
    "DELETE /v1/admin/models/{name}",
}
#: They want the name of a model that is served, or a vocabulary that can fill in, which no schema
#: tells; or they say that the operator does it. Their own tests have answers of them.
REFUSE_ALL = {
    *("POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/embeddings"),
    *("POST /api/show", "POST /api/pull", "POST /infill"),
    *("POST /api/create", "POST /api/copy", "POST /api/push", "DELETE /api/delete"),
}
MAX_SESSIONS, MAX_TOKENS = 4096, 8
MAX_ITEMS = 1024


def closed(value: Any) -> Any:
    """``value`` with objects that have no fields but those that are named.

    Longer lists than `MAX_ITEMS` are not tried: those of messages would be a body of 60 MB.
    """
    if isinstance(value, list):
        return [closed(part) for part in value]
    if not isinstance(value, dict):
        return value
    parts = {name: closed(part) for name, part in value.items()}
    if "properties" in parts and isinstance(parts.get("type"), str):
        parts.setdefault("additionalProperties", False)
    if isinstance(bound := parts.get("maxItems"), int) and bound > MAX_ITEMS:
        del parts["maxItems"]
    return parts


async def document_of(server: Running, headers: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = (await server.http.get("/openapi.json", headers=headers)).json()
    return document


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running() as started:
        yield started


async def session_file(server: Running, headers: dict[str, str]) -> bytes:
    """A session that has seen something, exported."""
    post, get = server.http.post, server.http.get
    session = (await post("/v1/sessions", headers=headers)).json()["session"]
    url = f"/v1/sessions/{session}"
    await post(f"{url}/append", headers=headers, json={"text": "once"})
    return (await get(f"{url}/export", headers=headers)).content


async def fuzz(
    server: Running,
    folder: Path,
    document: dict[str, Any],
    *options: str,
    headers: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and output of the fuzzer; `SEEN_FILE` in ``folder`` has what it saw."""
    headers = headers or {}
    session = await session_file(server, headers)
    (folder / SESSION_FILE).write_bytes(session)
    for name in STATES:
        await server.http.post(
            "/v1/admin/states", params={"name": name}, content=session, headers=headers
        )
    (folder / "openapi.json").write_text(json.dumps(document))
    for name, value in headers.items():
        options += ("--header", f"{name}: {value}")
    command = ("-m", "schemathesis.cli", "run", "openapi.json", "--generation-deterministic")
    where = {"SCHEMATHESIS_HOOKS": "tests.reliability.openapi_hooks", "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *("--url", f"http://127.0.0.1:{server.port}", "--exclude-checks", LEFT_OUT),
        *("--suppress-health-check", "all", "--request-timeout", "60"),  # for a busy machine
        *options,
        cwd=folder,
        env=os.environ | where,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


def seen_by(folder: Path) -> dict[str, set[int]]:
    """The statuses of each operation."""
    found: dict[str, set[int]] = defaultdict(set)
    for line in (folder / SEEN_FILE).read_text().splitlines():
        operation, _, status = line.rpartition(" ")
        found[operation].add(int(status))
    return found


def operations_of(document: dict[str, Any]) -> set[str]:
    paths = document["paths"].items()
    return {f"{method.upper()} {path}" for path, operations in paths for method in operations}


async def assert_well(server: Running, headers: dict[str, str]) -> None:
    """Nothing is left of the fuzzer's work, and the next request is served."""
    async with asyncio.timeout(STUCK_S):
        await server.async_engine.drained()
    assert server.async_engine.healthy
    body = {"prompt": "hi", "max_tokens": 1}
    assert (await server.http.post("/v1/completions", headers=headers, json=body)).is_success


@pytest.mark.timeout(1800)
async def test_no_answer_is_an_error_of_ours_or_undocumented(
    long: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(FakeEngine(MAX_SESSIONS), max_tokens_limit=MAX_TOKENS) as server:
        document = closed(await document_of(server, {}))
        num = 500 if long else 10
        code, output = await fuzz(server, tmp_path, document, "--max-examples", str(num))
        assert code == 0, output
        await assert_well(server, {})
    assert "Traceback" not in caplog.text
    seen = seen_by(tmp_path)
    assert seen.keys() == operations_of(document)
    for operation, statuses in seen.items():
        if operation in NEEDS_A_FOLDER | REFUSE_ALL:
            assert statuses & {400, 403, 404, 409}, (operation, statuses)
            continue
        assert 200 in statuses, (operation, statuses)
    assert {400, 404, 405} <= set().union(*seen.values())


@pytest.mark.timeout(1800)
async def test_every_route_but_the_open_ones_declares_and_requires_a_key(
    long: bool, tmp_path: Path
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with running(
        FakeEngine(MAX_SESSIONS), admin_keys=(KEY,), max_tokens_limit=MAX_TOKENS
    ) as server:
        document = closed(await document_of(server, headers))
        assert document["security"] == [{"key": []}]
        options = ["--max-examples", "500"] if long else ["--phases", "fuzzing", "-n", "4"]
        code, output = await fuzz(server, tmp_path, document, *options, headers=headers)
        assert code == 0, output
        await assert_well(server, headers)
        for operation in operations_of(document):
            method, path = operation.split()
            described = document["paths"][path][method.lower()]
            answer = await server.http.request(method, path)
            if operation in OPEN:
                assert described["security"] == []
                assert answer.status_code == 200
            else:
                assert "401" in described["responses"], operation
                assert answer.status_code == 401, operation
    assert 200 in set().union(*seen_by(tmp_path).values())


async def test_answer_that_the_document_does_not_describe_is_found(tmp_path: Path) -> None:
    async with running() as server:
        document = closed(await document_of(server, {}))
        session, cancel = "/v1/sessions/{session}", "/v1/sessions/{session}/cancel"
        paths = {path: document["paths"][path] for path in ("/v1/models", session, cancel)}
        document["paths"] = paths
        models = document["components"]["schemas"]["ModelList"]
        models["required"].remove("object")
        del models["properties"]["object"]
        del paths[session]["get"]["responses"]["404"]
        paths[cancel]["post"]["responses"]["404"]["content"] = {"text/plain": {}}
        code, output = await fuzz(server, tmp_path, document, "--phases", "fuzzing", "-n", "5")
    assert code == 1, output
    for found in ("status code: 1", "Content-Type: 1", "violates schema: 1"):
        assert found in output, output


async def test_405_names_every_method_of_the_path(server: Running) -> None:
    document = await document_of(server, {})
    for path, operations in document["paths"].items():
        answer = await server.http.request("PATCH", path)
        assert answer.status_code == 405
        allowed = set(answer.headers["allow"].split(", "))
        assert allowed >= {method.upper() for method in operations}, path
    both = (await server.http.request("PATCH", "/v1/sessions/x")).headers["allow"]
    assert both == "DELETE, GET, HEAD"


@pytest.mark.parametrize(
    ("path", "name", "values"),
    [
        ("/v1/sessions", "limit", ["0", "-1", "1001", "9" * 5000, "1.0", "1_0", " 1", "", "null"]),
        ("/v1/sessions", "limt", ["1"]),
        ("/v1/sessions/x/events", "starting_after", ["-1", "9007199254740993", "1e3", "٣", "null"]),
        ("/v1/sessions/x/events", "epoch", ["", "e" * 65]),
        ("/v1/sessions/x/events", "take_over", ["1", "yes", "True", "", "null"]),
        ("/v1/sessions/x/events", "n" * 500, ["1"]),
    ],
)
async def test_bad_value_in_a_query_is_a_400_that_names_it(
    server: Running, path: str, name: str, values: list[str]
) -> None:
    for value in values:
        answer: httpx.Response = await server.http.get(path, params={name: value})
        assert answer.status_code == 400, value[:50]
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", name[:64])
        assert error["message"].startswith(f"{name[:64]}: "), error
        assert len(error["message"]) < 200
