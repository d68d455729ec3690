"""01: a name with a control character is a 400 that names its field, and no store ever sees it.

PostgreSQL refuses a NUL in a text. A name that got past the wire would fail in the store's
thread, after the write-ahead log had it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from websockets.asyncio.client import connect

from server.api.anthropic.body import MessagesBody
from server.api.openai.bodies import CompletionBody
from server.api.openai.chat import ChatBody
from server.api.openai.responses.items import ResponseCreate
from server.api.routes.models import LoadModelBody, ReloadModelBody
from server.api.schemas import wire
from server.api.schemas.requests import FormatPart, Message
from server.api.schemas.wire import Wire
from tests.postgres import Postgres
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.server.harness import Running
from tests.tiny import write_model

#: As they stand in JSON. The last one is no Unicode text, which the parser sees before the field.
CONTROLS = ("\\u0000", "\\n", "\\r", "\\t", "\\u001b", "\\u007f", "\\u0085", "\\u009f")
SURROGATES = ("\\ud800", "\\udfff", "\\ud800\\u0041")

#: Texts that a model reads or a client is told again. A store has them as token ids, in JSON,
#: which escapes them, or not at all.
FREE_TEXT = {
    *("arguments", "choices", "content", "description", "documents", "grammar", "input"),
    *(
        "instructions",
        "output",
        "prompt",
        "query",
        "reasoning_content",
        "refusal",
        "regex",
        "stop",
        "suffix",
        "text",
    ),
    *("context", "continuation", "continuations", "annotations", "metadata", "obfuscation"),
    *("chat_template_kwargs", "parameters", "schema", "logprobs", "message"),
    *("system", "stop_sequences", "thinking"),
    *("dry_sequence_breakers", "input_prefix", "input_suffix"),
}


def strings(schema: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every schema of a string, by the name of the field that has it."""
    if isinstance(schema, list):
        for part in schema:
            yield from strings(part, name)
    elif isinstance(schema, dict):
        if schema.get("type") == "string":
            yield name, schema
        for key, part in schema.items():
            if key in ("properties", "$defs"):
                for field, inner in part.items():
                    yield from strings(inner, field)
            elif key not in ("enum", "const", "examples", "default"):
                yield from strings(part, name)


def kinds(base: type[Any]) -> Iterator[type[Any]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_string_is_a_name_a_pattern_or_known_to_be_free() -> None:
    """A new field has to be declared: as one of `schemas.names`, or here as a text."""
    unknown, seen = set(), 0
    for model in (*kinds(Wire), *kinds(FormatPart)):
        for field, schema in strings(TypeAdapter(model).json_schema()):
            seen += 1
            bounded = {"pattern", "enum", "const"} & schema.keys()
            if not bounded and field not in FREE_TEXT:
                unknown.add((model.__name__, field))
    assert seen > 100
    assert unknown == set()


def test_documented_pattern_matches_the_check() -> None:
    import re

    for code in range(0x2100):
        assert bool(re.search(wire.PATTERN, chr(code) + "a")) != wire.has_control(chr(code))


# Bodies and messages, found from their schemas


def named_fields(model: Any) -> list[str]:
    """The fields of ``model`` itself that are names."""
    schema = TypeAdapter(model).json_schema()
    return [
        field
        for field, part in schema["properties"].items()
        if any(found.get("pattern") == wire.PATTERN for _, found in strings(part))
    ]


BASE = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1, "keep": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/sessions": {},
    "/v1/admin/models": {"name": "a", "path": "a"},
}
HTTP = [
    *(("/v1/completions", field) for field in named_fields(CompletionBody)),
    *(("/v1/chat/completions", field) for field in named_fields(ChatBody)),
    *(("/v1/responses", field) for field in named_fields(ResponseCreate) if field != "stream_id"),
    *(("/v1/messages", field) for field in named_fields(MessagesBody)),
    *(("/v1/admin/models", field) for field in named_fields(LoadModelBody)),
    *((f"/v1/{path}", "model") for path in ("embeddings", "score", "sessions")),
    *((f"/{path}", "model") for path in ("tokenize", "detokenize")),
]
MESSAGES = [
    (kind, field)
    for kind, ref in TypeAdapter(Message).json_schema()["discriminator"]["mapping"].items()
    for field, part in TypeAdapter(Message)
    .json_schema()["$defs"][ref.rpartition("/")[2]]["properties"]
    .items()
    if any(found.get("pattern") == wire.PATTERN for _, found in strings(part))
]
MESSAGE_BASE = {
    "create": {},
    "generate": {"prompt": "a"},
    "append": {"session": "s", "text": "a"},
    "cancel": {},
    "detach": {},
    "delete": {"session": "s"},
    "fork": {"session": "s"},
    "rewind": {"session": "s", "at": 0},
    "resume": {"session": "s", "last_seq": 0},
}
PATHS = (
    ("GET", "/v1/sessions/a%00b"),
    ("GET", "/v1/sessions/%0a/events"),
    ("POST", "/v1/sessions/%00/append"),
    ("DELETE", "/v1/sessions/a%7fb"),
    ("GET", "/v1/responses/a%00b"),
    ("GET", "/v1/responses/%c2%85/input_items"),
    ("GET", "/v1/models/a%00b"),
    ("POST", "/v1/admin/models/a%00b/reload"),
    ("DELETE", "/v1/admin/models/a%0ab"),
    ("GET", "/static/%00"),
    ("GET", "/health%0a"),
)
QUERIES = (
    ("/v1/sessions?after=a%00b", "after"),
    ("/v1/responses/x/input_items?after=%00", "after"),
    ("/v1/sessions/x/events?epoch=a%0ab", "epoch"),
)


def with_value(base: dict[str, Any], field: str, control: str) -> bytes:
    """JSON of ``base`` with ``field`` ``a?b``, the escape as it is given."""
    return json.dumps({**base, field: "a@b"}).replace("a@b", f"a{control}b").encode()


def refused(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["param"]


def test_tables_have_what_a_store_has() -> None:
    assert ("/v1/completions", "idempotency_key") in HTTP
    assert ("/v1/completions", "session") in HTTP
    assert ("/v1/responses", "previous_response_id") in HTTP
    assert ("generate", "request_id") in MESSAGES
    assert ("resume", "epoch") in MESSAGES
    assert named_fields(ReloadModelBody) == ["path"]


@pytest.mark.parametrize(("path", "field"), HTTP)
async def test_name_in_a_body(server: Running, path: str, field: str) -> None:
    for control in CONTROLS:
        body = with_value(BASE.get(path, {}), field, control)
        answer = await server.http.post(path, content=body)
        assert refused(answer) == (400, field), (control, answer.text)
    for surrogate in SURROGATES:
        body = with_value(BASE.get(path, {}), field, surrogate)
        assert (await server.http.post(path, content=body)).status_code == 400


@pytest.mark.parametrize(("kind", "field"), MESSAGES)
async def test_name_in_a_message(server: Running, kind: str, field: str) -> None:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/stream") as socket:
        for control in (*CONTROLS, *SURROGATES):
            base = {"type": kind, "request_id": "r", **MESSAGE_BASE[kind]}
            await socket.send(with_value(base, field, control).decode())
            frame = json.loads(await socket.recv())
            assert (frame["type"], frame["status"]) == ("error", 400), frame
            if control in CONTROLS:
                assert frame["error"]["param"] == field


@pytest.mark.parametrize("field", named_fields(ResponseCreate))
async def test_name_in_a_message_of_responses(server: Running, field: str) -> None:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/responses") as socket:
        for control in (*CONTROLS, *SURROGATES):
            base = {"type": "response.create", "input": "a"}
            await socket.send(with_value(base, field, control).decode())
            frame = json.loads(await socket.recv())
            assert (frame["type"], frame["status"]) == ("error", 400), frame
            if control in CONTROLS:
                assert frame["error"]["param"] == field


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_control_character_in_a_path(server: Running, method: str, path: str) -> None:
    url = httpx.URL(f"http://127.0.0.1:{server.port}").copy_with(raw_path=path.encode())
    assert refused(await server.http.request(method, url)) == (400, "path")


@pytest.mark.parametrize(("path", "field"), QUERIES)
async def test_name_in_a_query(server: Running, path: str, field: str) -> None:
    assert refused(await server.http.get(path)) == (400, field)


async def test_name_in_the_last_event_id(server: Running) -> None:
    for bad in (b"a\x85b:1", b"a\tb:1", b"a" * 65 + b":1"):
        headers = [(b"last-event-id", bad)]
        answer = await server.http.get("/v1/sessions/x/events", headers=headers)
        assert refused(answer) == (400, "Last-Event-ID")


# The shared store


async def test_shared_store_works_after_every_hostile_name(
    tmp_path: Path, postgres: Postgres, database_url: str
) -> None:
    """Of each kind one, to a real server on a real PostgreSQL; then a session is kept."""
    model = write_model(tmp_path)
    with ServerProcess("--model", model, "--store", database_url) as server:
        async with connect(server.stream_url) as socket:
            for kind, field in MESSAGES:
                base = {"type": kind, "request_id": "r", "keep": True, **MESSAGE_BASE[kind]}
                if kind != "generate":
                    del base["keep"]
                await socket.send(with_value(base, field, "\\u0000").decode())
                assert json.loads(await socket.recv())["error"]["param"] == field
            work = {"type": "generate", "request_id": "r", "prompt": "a", "keep": True}
            await socket.send(json.dumps(work | {"max_tokens": 4, "ignore_eos": True}))
            frames = [json.loads(await socket.recv()) for _ in range(6)]
            assert frames[-1]["type"] == "finished", frames
        async with httpx.AsyncClient(base_url=server.url, timeout=STUCK_S) as http:
            for path, field in HTTP:
                body = with_value(BASE.get(path, {}), field, "\\u0000")
                assert refused(await http.post(path, content=body)) == (400, field)
            for path, field in QUERIES:
                assert refused(await http.get(path)) == (400, field)
            session = frames[0]["session"]
            answer = await http.post(f"/v1/sessions/{session}/append", json={"text": "b"})
            assert answer.status_code == 200, answer.text
        assert "failed" not in server.log()
