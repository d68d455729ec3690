"""Prompts that continue a prefix by its handle, over HTTP and over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sse
from server.engine.prefixes import PrefixHandle
from tests.fakes import FakeEngine
from tests.server.harness import Running, receive, receive_until, running, send
from tests.server.served import Served, served
from tests.tiny import write_model

pytestmark = pytest.mark.process

PROMPT = "a" * 200
MORE = [*b"and so"]
FEW = {"max_tokens": 5, "seed": 0}
UNKNOWN = str(PrefixHandle(bytes(32), (1,)))


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(max_prefixes=8)) as started:
        yield started


async def completed(server: Running, **body: Any) -> dict[str, Any]:
    answer = await server.generate(**FEW | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def handle_of(server: Running, prompt: str = PROMPT) -> str:
    answer = await completed(server, prompt=prompt, max_tokens=0, return_prefix=True)
    handle = answer["prefix"]
    assert isinstance(handle, str)
    return handle


async def refusal(server: Running, **body: Any) -> dict[str, Any]:
    answer = await server.generate(**FEW | body)
    assert answer.status_code in (400, 404), answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


@pytest.mark.parametrize("prompt", ["and so", MORE])
async def test_continuation_over_http_is_that_of_the_whole_text(
    server: Running, prompt: str | list[int]
) -> None:
    whole = await completed(server, prompt=PROMPT + "and so")
    found = await completed(server, prompt=prompt, prefix=await handle_of(server))
    assert (found["choices"], found["position"]) == (whole["choices"], whole["position"])
    assert found["usage"]["prompt_tokens"] == len(MORE)
    assert "prefix" not in found, "it was not asked for"


async def test_prefix_is_continued_without_a_prompt(server: Running) -> None:
    whole = await completed(server, prompt=PROMPT)
    found = await completed(server, prefix=await handle_of(server))
    assert found["choices"] == whole["choices"]


async def test_each_prompt_of_a_list_continues_the_prefix(server: Running) -> None:
    found = await completed(server, prompt=["b", "cd"], prefix=await handle_of(server))
    wanted = [await completed(server, prompt=PROMPT + more) for more in ("b", "cd")]
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == [whole["choices"][0]["text"] for whole in wanted]


async def test_last_chunk_of_a_stream_has_the_handle(server: Running) -> None:
    handle = await handle_of(server)
    body = {"prompt": PROMPT, "return_prefix": True, "stream": True, **FEW}
    chunks = sse.values_of((await server.generate(**body)).text, done=True)
    assert [chunk.get("prefix") for chunk in chunks if chunk["choices"]][-1] == handle
    assert not any("prefix" in chunk for chunk in chunks[:-1])


async def test_handle_over_a_socket_and_what_continues_it(server: Running) -> None:
    async with server.socket() as socket:
        asked = {"type": "generate", "prompt": PROMPT, "return_prefix": True, **FEW}
        await send(socket, request_id="a", **asked)
        handle = (await receive_until(socket, "finished"))[-1]["prefix"]
        assert handle == await handle_of(server)
        await send(socket, type="generate", request_id="b", prompt=MORE, prefix=handle, **FEW)
        started, *tokens, finished = await receive_until(socket, "finished")
    assert started["position"] == len(PROMPT)
    whole = await completed(server, prompt=PROMPT + "and so")
    text = "".join(frame["text"] for frame in (*tokens, finished))
    assert text == whole["choices"][0]["text"]
    assert "prefix" not in finished


async def test_kept_session_continues_a_prefix(server: Running) -> None:
    body = {"prompt": MORE, "keep": True, "prefix": await handle_of(server)}
    session = (await completed(server, **body))["session"]
    text = (await server.http.get(f"/v1/sessions/{session}/text")).json()
    assert text["start"] == len(PROMPT), "what another request has read is not in its log"
    first, second = [await completed(server, prompt="x", session=session) for _ in range(2)]
    assert second["position"] > first["position"] > len(PROMPT)


async def test_unknown_prefix_is_a_404_that_says_what_to_do(server: Running) -> None:
    error = await refusal(server, prompt="b", prefix=UNKNOWN)
    assert (error["code"], error["param"]) == ("prefix_not_found", "prefix")
    assert "send the whole prompt" in error["message"]
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="a", prompt="b", prefix=UNKNOWN)
        frame = await receive(socket)
    assert (frame["status"], frame["error"]) == (404, error)


async def test_prefix_of_another_tenant_is_unknown() -> None:
    keys = [{"Authorization": f"Bearer {name}-key-of-the-test"} for name in ("one", "other")]
    engine = FakeEngine(max_prefixes=8)
    async with running(engine, api_keys=("one-key-of-the-test", "other-key-of-the-test")) as server:
        asked = {"prompt": PROMPT, "return_prefix": True, **FEW}
        url = "/v1/completions"
        handle = (await server.http.post(url, json=asked, headers=keys[0])).json()["prefix"]
        body = {"prompt": "b", "prefix": handle, **FEW}
        found = [(await server.http.post(url, json=body, headers=key)).status_code for key in keys]
    assert found == [200, 404]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prefix": "system prompt"}, "prefix"),
        ({"prefix": str(PrefixHandle(bytes(32), (257,)))}, "prefix"),
        ({"prefix": UNKNOWN, "session": "s"}, "prefix"),
        ({"prefix": UNKNOWN, "state": "s"}, "state"),
        ({"return_prefix": True, "session": "s"}, "return_prefix"),
        ({"return_prefix": True, "prompt": ["b", "c"]}, "return_prefix"),
    ],
)
async def test_fields_that_do_not_go_together_are_named(
    server: Running, body: dict[str, Any], param: str
) -> None:
    error = await refusal(server, **{"prompt": "b", **body})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


async def test_handle_outlives_a_restart_where_prefixes_are_on_the_disk(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model"))
    settings = {
        "store": str(tmp_path / "store"),
        "prefix_cache": 20_000,
        "prefix_disk": 1 << 24,
    }
    prompt, more = [10 + n % 200 for n in range(300)], [7, 8, 9]
    async with served(model, **settings) as server:
        handle = (await server.complete(prompt, return_prefix=True))["prefix"]
        wanted = await server.complete(more, prefix=handle)
        for start in range(1, 9):  # which make the room that they need
            for _ in range(3):
                await server.complete([start + n for n in range(200)])
        assert await server.text(more, prefix=handle) == wanted["choices"][0]["text"]
    async with served(model, **settings) as server:
        again = await server.complete(more, prefix=handle)
        assert again.get("choices") == wanted["choices"], again


SYSTEM = [10 + n % 200 for n in range(300)]


def sizes(store: Path) -> list[int]:
    """Of the prefixes on the disk."""
    return [file.stat().st_size for file in store.glob("prefixes/*/*.safetensors")]


async def cached_tokens(server: Served, prompt: list[int]) -> int:
    answer = await server.complete(prompt)
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("off", [{"prefix_disk": 0}, {"prefix_cache": 0}])
async def test_no_prefix_is_written_where_they_are_off(tmp_path: Path, off: dict[str, int]) -> None:
    model, store = str(write_model(tmp_path / "model")), tmp_path / "store"
    for _ in range(2):
        async with served(model, store=str(store), **off) as server:
            assert await cached_tokens(server, SYSTEM) == 0
            await cached_tokens(server, SYSTEM)
        assert sizes(store) == []


async def test_prefixes_on_the_disk_are_bounded_in_bytes(tmp_path: Path) -> None:
    model, store = str(write_model(tmp_path / "model")), tmp_path / "store"
    async with served(model, store=str(store)) as server:
        await server.complete(SYSTEM)
    one, total = max(sizes(store)), sum(sizes(store))
    assert total >= 2 * one
    for shift in (1, 2):
        async with served(model, store=str(store), prefix_disk=2 * one) as server:
            await server.complete([token + shift for token in SYSTEM])
        assert one <= sum(sizes(store)) <= 2 * one


async def test_server_starts_where_the_folder_of_prefixes_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, store = str(write_model(tmp_path / "model")), tmp_path / "store"
    store.mkdir()
    (store / "prefixes").write_bytes(b"no folder")
    async with served(model, store=str(store)) as server:
        assert await cached_tokens(server, SYSTEM) == 0
        assert await cached_tokens(server, SYSTEM) >= 256
    assert "the prefix cache is not kept on the disk" in caplog.text


async def test_damaged_prefixes_are_computed_again(tmp_path: Path) -> None:
    model, store = str(write_model(tmp_path / "model")), tmp_path / "store"
    async with served(model, store=str(store)) as server:
        text = await server.text(SYSTEM)
    files = list(store.glob("prefixes/*/*.safetensors"))
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    (files[0].parent / "foreign-file.safetensors").write_bytes(b"")
    (files[0].parent / "cut.new").write_bytes(b"")
    async with served(model, store=str(store)) as server:
        assert not (files[0].parent / "cut.new").exists()
        assert await cached_tokens(server, SYSTEM) == 0
        assert await server.text(SYSTEM) == text
