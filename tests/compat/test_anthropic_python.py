"""Anthropic's package for Python, and LangChain's class over it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from model.bundled_models import DEFAULT_NAME
from tests.chatty import lines_of_chance, write_chatty
from tests.compat.environments import Client, python_client
from tests.docs.blocks import blocks_of
from tests.docs.pages import DOCS
from tests.reliability.servers import ServerProcess
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)

PAGE = DOCS / "use" / "anthropic.md"


@pytest.fixture(scope="module")
def client() -> Client:
    return python_client("anthropic")


def test_the_anthropic_package_passes_its_checks(
    client: Client, environment: dict[str, str]
) -> None:
    client.check(timeout_s=300, **environment)


def test_the_program_of_the_page_prints_an_answer_once(client: Client, tmp_path: Path) -> None:
    """The page's server, with the bundled model in the place of the download."""
    (program,) = (block.text for block in blocks_of(PAGE) if block.language == "python")
    assert "http://127.0.0.1:8000" in program
    with ServerProcess("--served-model-name", "small", "--store", tmp_path) as server:
        program = program.replace("http://127.0.0.1:8000", server.url)
        first, again = (client.run("-c", program, timeout_s=60) for _ in range(2))
        assert first.strip()
        assert first == again
        assert len(sessions_of(server)) == 1


def sessions_of(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.get("/v1/sessions")[1])["data"]
    return found


def answered(client: Client, way: str, server: ServerProcess) -> list[str]:
    """What the program prints: errors that it has met, and the text."""
    output = client.run("over_a_kill.py", way, timeout_s=300, EVERSTREAM_URL=server.url)
    return output.splitlines()


@pytest.mark.parametrize("way", ["stream", "whole"])
async def test_message_under_a_key_is_whole_over_a_kill(
    way: str, client: Client, tmp_path: Path
) -> None:
    """Where it is not streamed the package retries by itself: nothing of the program is for it.

    The model writes lines, each one of two by chance, and takes some milliseconds for one.
    """
    model = write_chatty(tmp_path, lines_of_chance())
    flags = ("--model", f"{DEFAULT_NAME}={model}", "--threads", 1, "--dtype", "float32")
    with ServerProcess(*flags, "--store", tmp_path / "store") as server:
        running = asyncio.create_task(asyncio.to_thread(answered, client, way, server))
        await eventually(lambda: any(one["busy"] and one["seq"] > 9 for one in sessions_of(server)))
        await asyncio.to_thread(server.restart)
        *cuts, text = await running
        assert len(sessions_of(server)) == 1
    assert bool(cuts) == (way == "stream")
    assert json.loads(text).count("Line ") == 499  # the first token ends the thinking
    with ServerProcess(*flags, "--store", tmp_path / "other") as server:  # has not heard of the key
        (uninterrupted,) = await asyncio.to_thread(answered, client, "whole", server)
    assert uninterrupted == text
