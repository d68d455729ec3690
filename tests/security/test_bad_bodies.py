"""What a body of one megabyte can make of the time to refuse it.

An error costs some microseconds to report, so that a body with hundreds of thousands of them
would hold the event loop for seconds. Validation ends at the first ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from server.api.openai import bodies
from server.api.openai import chat as chat_schemas
from server.api.openai.responses import items
from server.api.routes.models import LoadModelBody
from server.api.schemas import requests as schemas
from server.api.schemas import wire
from server.api.schemas.wire import Wire
from tests.server.harness import running

MANY = 5000
MAX_ERRORS = 100
MODELS: list[type[Wire]] = [
    *(bodies.CompletionBody, bodies.EmbeddingsBody, bodies.ScoreBody, bodies.TokenizeBody),
    *(bodies.DetokenizeBody, chat_schemas.ChatBody, items.ResponseCreate),
    *(schemas.Generate, schemas.AppendBody, schemas.ForkBody, LoadModelBody),
]
NAN = float("nan")
FIELDS = {f"k{index}": 1 for index in range(MANY)}


def hostile() -> Iterator[Any]:
    """Values that have many things wrong, for any field."""
    for item in ({}, NAN, -1, "", [], {"type": "text"}, None):
        yield [item] * MANY
        yield [[item] * MANY]
        yield {f"k{index}": item for index in range(MANY)}
    for role in ("user", "assistant", "tool"):
        for inner in ("content", "tool_calls", "annotations"):
            message = {"role": role, "tool_call_id": "a", inner: [{}] * MANY}
            yield [message]
            yield [message] * 100
        yield [{"role": role, "content": "a", **FIELDS}]
    for kind in ("text", "input_text", "output_text"):
        yield [{"role": "user", "content": [{"type": kind, "text": "a", **FIELDS}]}]
        listed = {"annotations": [NAN] * MANY, "logprobs": [NAN] * MANY}
        yield [{"role": "assistant", "content": [{"type": kind, "text": "a", **listed}]}]
    for function in ({"name": "a", **FIELDS}, {"name": "a", "parameters": {"a": [NAN] * MANY}}):
        yield [{"type": "function", "function": function}]
        yield {"type": "function", "function": function}
        yield [{"type": "function", **function}]
    yield {"type": "text", **FIELDS}
    yield {"format": {"type": "text", **FIELDS}}
    yield {"type": "choice", "choices": [1] * MANY}
    yield {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **FIELDS}}
    yield {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": [NAN] * MANY}}}
    yield {"a": [NAN] * MANY}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_validation_ends_at_the_first_errors(model: type[Wire]) -> None:
    for value in hostile():
        for name in model.model_fields:
            assert num_errors(model, {name: value}) <= MAX_ERRORS, (name, str(value)[:200])


def num_errors(model: type[Wire], value: dict[str, Any]) -> int:
    try:
        model.model_validate(value)
    except ValidationError as error:
        return error.error_count()
    return 0


async def test_other_requests_are_answered_while_a_large_body_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parser of the large body waits for the answer to the other request."""
    answered, parsers = threading.Event(), []
    parsed = wire._parsed

    def waiting(validate: Any, body: bytes, *others: Any) -> Any:
        parsers.append(threading.current_thread())
        if len(body) > wire.MAX_INLINE_BYTES:
            assert answered.wait(30)
        return parsed(validate, body, *others)

    monkeypatch.setattr(wire, "_parsed", waiting)
    content = [{}] * 4000
    body = json.dumps({"messages": [{"role": "user", "content": content}] * 50})
    async with running() as server:
        large = server.http.build_request("POST", "/v1/chat/completions", content=body)
        sent = asyncio.create_task(server.http.send(large))
        assert (await server.generate(prompt="a", max_tokens=1)).status_code == 200
        answered.set()
        refused = await sent
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "messages[0].content[0].type",
    )
    assert len(parsers) == 2 and threading.main_thread() in parsers


def test_value_of_many_fields_is_refused_by_its_name() -> None:
    body = {"messages": [{"role": "user", "content": "a", **FIELDS}]}
    with pytest.raises(Exception, match=r"messages\[0\].k0: there is no such field"):
        wire.parse_body(chat_schemas.ChatBody, json.dumps(body).encode())
