"""The AsyncAPI document says what is true of `/v1/stream`, and is one by AsyncAPI's own schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft7Validator
from pydantic import TypeAdapter, ValidationError

from server.api.events import encode
from server.api.schemas.requests import MESSAGE_TYPES
from server.api.schemas.responses import AnyFrame, DeletedFrame
from server.api.stream import REPLIES, document
from tests.server.harness import Running, checked, receive, receive_until, running, send

DOCUMENT = document("0.0.0", "localhost:8000", wants_key=True)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


def resolved(reference: str) -> Any:
    found: Any = DOCUMENT
    for key in reference.removeprefix("#/").split("/"):
        found = found[key]
    return found


def payload(name: str) -> Draft7Validator:
    """What AsyncAPI's tools check a message by."""
    reference = DOCUMENT["components"]["messages"][name]["payload"]
    return Draft7Validator({**reference, "components": DOCUMENT["components"]})


def test_every_reference_leads_somewhere() -> None:
    found = set(references(DOCUMENT))
    assert len(found) > 50
    assert all(resolved(reference) for reference in found)


def test_every_message_of_a_client_is_received_and_answered() -> None:
    operations = DOCUMENT["operations"]
    assert tuple(operations) == MESSAGE_TYPES == tuple(REPLIES)
    for name, operation in operations.items():
        assert operation["action"] == "receive"
        assert operation["messages"] == [{"$ref": f"#/channels/stream/messages/{name}"}]
        replies = [resolved(each["$ref"])["$ref"] for each in operation["reply"]["messages"]]
        assert replies[-1].endswith("/error")
    answered = {reply for replies in REPLIES.values() for reply in replies} | {"error"}
    frames = set(DOCUMENT["channels"]["stream"]["messages"]) - set(MESSAGE_TYPES)
    assert answered == frames


def test_every_message_has_a_strict_schema_and_a_summary() -> None:
    for name, message in DOCUMENT["components"]["messages"].items():
        schema = resolved(message["payload"]["$ref"])
        assert schema["additionalProperties"] in (False, {"type": "null"}), name
        assert schema["properties"]["type"]["const"] == name
        assert message["summary"].endswith("."), name


def test_schemas_refuse_what_the_server_refuses() -> None:
    good = {"type": "generate", "request_id": "a", "prompt": [1, 2], "temperature": 0.5}
    assert payload("generate").is_valid(good)
    for bad in ({"temperature": 3}, {"more": 1}, {"request_id": ""}, {"prompt": 1}):
        assert not payload("generate").is_valid({**good, **bad}), bad


@pytest.fixture
async def server() -> Any:
    async with running() as started:
        yield started


async def test_server_serves_it_with_its_own_address(server: Running) -> None:
    served = (await server.http.get("/asyncapi.json")).json()
    assert served["servers"]["here"] == {"host": f"127.0.0.1:{server.port}", "protocol": "ws"}
    assert served["components"] == DOCUMENT["components"]
    page = (await server.http.get("/docs")).text
    assert 'href="/asyncapi.json"' in page


async def test_key_is_named_where_one_is_wanted() -> None:
    async with running(api_keys=("k",)) as server:
        answer = await server.http.get("/asyncapi.json", headers={"authorization": "Bearer k"})
    assert answer.json()["servers"]["here"]["security"]


async def test_every_frame_that_is_sent_is_as_described(server: Running) -> None:
    """One conversation with every message and every frame but those of a failing server."""
    seen: dict[str, dict[str, Any]] = {}

    def see(*frames: dict[str, Any]) -> None:
        seen.update({frame["type"]: frame for frame in frames})

    async with server.socket() as socket:
        await send(socket, type="create", request_id="1")
        see(await receive(socket))
        session = seen["created"]["session"]
        work = {"type": "generate", "prompt": "hi", "seed": 1, "max_tokens": 3}
        await send(socket, request_id="2", session=session, top_logprobs=2, **work)
        see(*await receive_until(socket, "finished"))
        await send(socket, type="append", request_id="3", session=session, text="x", logprobs=True)
        see(await receive(socket))
        await send(socket, type="fork", request_id="4", session=session)
        see(await receive(socket))
        await send(socket, type="rewind", request_id="5", session=session, at=2)
        see(await receive(socket))
        for epoch in (seen["rewound"]["epoch"], "another-0"):
            await send(
                socket, type="resume", request_id="6", session=session, last_seq=0, epoch=epoch
            )
            see(await receive(socket))
            for _ in range(4 if epoch != "another-0" else 0):
                await receive(socket)
        await send(socket, request_id="7", **{**work, "max_tokens": 10**6})
        await receive(socket)
        await send(socket, type="detach", request_id="7")
        see(*await receive_until(socket, "detached"))
        await send(socket, type="delete", request_id="8", session=session)
        see(await receive(socket))
        await socket.send("nonsense")
        see(await receive(socket))
    expected = set(DOCUMENT["channels"]["stream"]["messages"]) - set(MESSAGE_TYPES)
    assert seen.keys() == expected - {"migrate"}
    for name, frame in seen.items():
        assert payload(name).is_valid(frame), frame


def test_frame_that_has_drifted_is_seen() -> None:
    deleted: DeletedFrame = {"type": "deleted", "request_id": "r", "session": "s"}
    frame = encode(deleted)
    assert checked(frame)["session"] == "s"
    for bad in (b'{"type":"deleted"}', frame[:-1] + b',"more":1}', b'{"type":"unknown"}'):
        with pytest.raises(ValidationError):
            TypeAdapter(AnyFrame).validate_json(bad)
