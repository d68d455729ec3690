"""23: a prompt beyond the bounds is refused before anything is done with it; others continue."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.websocket import TEXT, frame
from server.config import ServerConfig
from tests.reliability.bystander import bystander
from tests.reliability.raw_websocket import connected, opened
from tests.reliability.servers import STUCK_S, ServerProcess

MIB = 1 << 20
SLACK_BYTES = 32 * MIB

#: Ten million tokens: as ids, and as text of a word each.
TEN_MILLION_IDS = b'{"prompt": [' + b"1," * 9_999_999 + b"1]}"
TEN_MILLION_WORDS = b'{"prompt": "' + b"a " * 10_000_000 + b'"}'
GENERATE = b'{"type": "generate", "request_id": "a", '
#: Under the bound on bytes, and over that on tokens.
UNDER_A_MIB = {
    "a": "a" * 1_000_000,
    "words": "a " * 500_000,
    "one letter of four bytes": "𐍈" * 80_000,
    "spaces": " " * 1_000_000,
    "no word ever": "xqzjkv" * 160_000,
    "ids": [1] * 300_000,
}


@pytest.mark.timeout(600)
async def test_prompt_of_ten_million_tokens_is_refused_by_its_bytes(long: bool) -> None:
    assert len(TEN_MILLION_IDS) > ServerConfig().max_body_bytes < len(TEN_MILLION_WORDS)
    with ServerProcess() as server:
        async with bystander(server.port) as other:
            resident_bytes = server.resident_bytes()
            await other.more(200)
            first = len(other.times_s)
            for body in (TEN_MILLION_IDS, TEN_MILLION_WORDS):
                head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                async with connected(server.port) as client:
                    await client.shake_hands(head + b"content-length: %d\r\n\r\n" % len(body))
                    assert client.status == 413
                async with connected(server.port) as client:
                    chunk = b"%x\r\n%b\r\n" % (2 * MIB, body[: 2 * MIB])
                    await client.shake_hands(head + b"transfer-encoding: chunked\r\n\r\n" + chunk)
                    assert client.status == 413
                async with opened(server.port) as client:
                    await client.send(frame(TEXT, length=len(body)))
                    assert await client.close_code() == 1009
                await other.more()
                assert server.get("/health")[0] == 200
            assert server.resident_bytes() - resident_bytes < SLACK_BYTES
            if long:
                other.report("beside ten million tokens", first)


@pytest.mark.timeout(600)
async def test_prompts_over_the_token_limit_get_400_and_others_continue(long: bool) -> None:
    with ServerProcess(environment={"EVERSTREAM_MAX_PROMPT_TOKENS": "32768"}) as server:
        async with bystander(server.port) as other, httpx.AsyncClient(timeout=STUCK_S) as http:
            for name in UNDER_A_MIB if long else ("a", "words", "ids"):
                prompt = UNDER_A_MIB[name]
                await other.more(200)
                first = len(other.times_s)
                body = json.dumps({"prompt": prompt}, ensure_ascii=False).encode()
                assert len(body) < ServerConfig().max_body_bytes
                asked = asyncio.create_task(http.post(f"{server.url}/v1/completions", content=body))
                await other.more()
                answer = await asked
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "prompt"
                async with opened(server.port) as client:
                    await client.send(frame(TEXT, GENERATE + body[1:]))
                    error = await client.receive_json()
                    assert (error["status"], error["error"]["param"]) == (400, "prompt")
                await other.more()
                if long:
                    other.report(f"beside a prompt of {name}", first)
            assert server.get("/health")[0] == 200
            assert server.gauges()["everstream_slots", "held"] == 1
