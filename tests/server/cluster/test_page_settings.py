"""The settings of postgresql.md and proxy.md, as they stand there, and what they lead to."""

from __future__ import annotations

import shlex
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from tests.docs.blocks import SHELL, Block, blocks_of
from tests.docs.pages import DOCS
from tests.pgbouncer import PgBouncer
from tests.postgres import Postgres
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.s3_server import S3Server
from tests.tiny import write_model

BLOCKS = [
    block
    for name in ("postgresql.md", "proxy.md")
    for block in blocks_of(DOCS / "operate" / name)
    if block.language in SHELL and block.first.startswith(("export ", "everstream serve "))
]
KEY = {"authorization": "Bearer YOUR_KEY"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}: {block.first[:40]}")
def test_session_is_served_by_every_process_of_the_block(
    block: Block, model: Path, postgres: Postgres, database_url: str, s3: S3Server, stack: ExitStack
) -> None:
    """There are two where the block starts fewer."""
    text = block.text.replace("BUCKET", s3.new_bucket())
    if "POOLER" in text:
        pooler = stack.enter_context(closing(PgBouncer(postgres)))
        text = text.replace(
            "postgresql://everstream:PASSWORD@POOLER:6432/everstream", pooler.url(database_url)
        )
    for place in ("127.0.0.1", "DATABASE:5432"):
        shown = f"postgresql://everstream:PASSWORD@{place}/everstream"
        text = text.replace(shown, database_url)
    lines = [shlex.split(line) for line in text.splitlines()]
    environment = {"EVERSTREAM_STORE": database_url, **s3.environment} | dict(
        word.split("=", 1) for words in lines if words[0] == "export" for word in words[1:]
    )
    flags = [without_port(words[2:]) for words in lines if words[0] == "everstream"]
    if len(flags) < 2:
        flags = 2 * (flags or [[]])
    servers = [
        stack.enter_context(ServerProcess("--model", model, *each, environment=environment))
        for each in flags
    ]
    body = {"prompt": "Once", "max_tokens": 3, "keep": True}
    made = asked(servers[0], body)
    for server in servers[1:]:
        again = asked(server, {"prompt": "", "max_tokens": 3, "session": made["session"]})
        assert again["session"] == made["session"]
    assert not any("storage failed" in server.log() for server in servers)


def without_port(words: list[str]) -> list[str]:
    """A server of a test takes a free one."""
    if "--port" in words:
        at = words.index("--port")
        return words[:at] + words[at + 2 :]
    return words


def asked(server: ServerProcess, body: dict[str, object]) -> dict[str, object]:
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=KEY, timeout=STUCK_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found
