"""The settings of postgresql.md and proxy.md, as they stand there, and what they lead to."""

from __future__ import annotations

import asyncio
import shlex
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.blocks import SHELL, Block, blocks_of
from tests.docs.pages import DOCS
from tests.pgbouncer import PgBouncer, needs_pgbouncer
from tests.postgres import Postgres
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.s3_server import S3Server
from tests.tiny import write_model
from tests.waiting import eventually

BLOCKS = [
    block
    for name in ("postgresql.md", "proxy.md")
    for block in blocks_of(DOCS / "operate" / name)
    if block.language in SHELL and block.first.startswith(("export ", "everstream serve "))
]
CASES = [
    pytest.param(
        block,
        marks=[needs_pgbouncer] if "POOLER" in block.text else [],
        id=f"{block.page}: {block.first[:40]}",
    )
    for block in BLOCKS
]
KEY = {"authorization": "Bearer YOUR_KEY"}
#: Some tokens more than a state of a prompt must save for replicas to share it.
PROMPT = [10 + number % 200 for number in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("block", CASES)
def test_session_is_served_by_every_process_of_the_block(
    block: Block, model: Path, postgres: Postgres, database_url: str, s3: S3Server, stack: ExitStack
) -> None:
    """There are two where the block starts fewer."""
    bucket = s3.new_bucket()
    text = block.text.replace("BUCKET", bucket)
    if "POOLER" in text:
        pooler = stack.enter_context(closing(PgBouncer(postgres)))
        text = text.replace(
            "postgresql://everstream:PASSWORD@POOLER:6432/everstream", pooler.url(database_url)
        )
    for place in ("127.0.0.1", "DATABASE:5432"):
        shown = f"postgresql://everstream:PASSWORD@{place}/everstream"
        text = text.replace(shown, database_url)
    lines = [shlex.split(line) for line in text.splitlines()]
    often = {"EVERSTREAM_SAVE_INTERVAL_TOKENS": "16"}
    environment = {"EVERSTREAM_STORE": database_url, **often, **s3.environment} | dict(
        word.split("=", 1) for words in lines if words[0] == "export" for word in words[1:]
    )
    flags = [without_port(words[2:]) for words in lines if words[0] == "everstream"]
    if len(flags) < 2:
        flags = 2 * (flags or [[]])
    servers = [
        stack.enter_context(ServerProcess("--model", model, *each, environment=environment))
        for each in flags
    ]
    body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "keep": True}
    made = asked(servers[0], body)
    for server in servers[1:]:
        again = asked(server, {"prompt": "", "max_tokens": 3, "session": made["session"]})
        assert again["session"] == made["session"]
    if "--prefix-disk" in text:
        asyncio.run(check_prefix_is_shared(*servers))
    for server in servers:
        assert server.stop() == 0
        assert "storage failed" not in server.log()
    assert bool(s3.objects(bucket)) == ("EVERSTREAM_STORE_OBJECTS" in environment)


async def check_prefix_is_shared(one: ServerProcess, other: ServerProcess) -> None:
    """``other`` has not read the prompt that ``one`` has, and needs not.

    It waits a moment for what the store has, no longer; so it is asked by the handle first, which
    is unknown until it has got the state.
    """
    handle = asked(one, {"prompt": PROMPT, "max_tokens": 1, "return_prefix": True})["prefix"]
    continued = {"prompt": "", "prefix": handle, "max_tokens": 1}
    await eventually(lambda: answer_of(other, continued).status_code == 200)
    usage = asked(other, {"prompt": PROMPT, "max_tokens": 1})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 128


def without_port(words: list[str]) -> list[str]:
    """A server of a test takes a free one."""
    if "--port" in words:
        at = words.index("--port")
        return words[:at] + words[at + 2 :]
    return words


def asked(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    answer = answer_of(server, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def answer_of(server: ServerProcess, body: dict[str, Any]) -> httpx.Response:
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=body, headers=KEY, timeout=STUCK_S, trust_env=False)
