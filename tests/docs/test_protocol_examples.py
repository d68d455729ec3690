"""Every example and table in docs/protocol.md is what the server really says and takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from starlette.routing import Route

from server.api import http, pages
from server.api.answers import Completion, ModelList, SessionAnswer
from server.api.completion import CompletionWriter
from server.api.errors import OUTCOMES, error_body
from server.api.frames import Work, created_frame, deleted_frame, error_frame
from server.api.schemas import Append, CompletionBody, Generate, Message, Sampling
from server.api.translate import parse_body, parse_message
from server.engine.errors import InvalidRequest, SessionNotFound
from server.engine.types import (
    Event,
    Finished,
    Request,
    SamplingParams,
    SessionInfo,
    Started,
    TokenEvent,
    Usage,
)
from tests.docs.pages import json_examples, names, page, rows, section
from tests.fakes import MODEL

TEXT = page("protocol.md")
EXAMPLES = json_examples(TEXT)
FROM_CLIENT = {"create", "generate", "append", "cancel", "delete"}
FRAMES = [e for e in EXAMPLES if "type" in e and e["type"] not in FROM_CLIENT]
MESSAGES = [e for e in EXAMPLES if e.get("type") in FROM_CLIENT]
KINDS = {"created", "started", "token", "finished", "appended", "deleted", "error"}


@pytest.mark.parametrize("example", FRAMES, ids=lambda example: example["type"])
def test_frame_is_what_the_server_makes(example: dict[str, Any]) -> None:
    made = json.loads(frame(example))
    assert made == example
    assert list(made) == list(example)


def test_every_frame_has_an_example() -> None:
    assert {example["type"] for example in FRAMES} == KINDS


@pytest.mark.parametrize("example", MESSAGES, ids=lambda example: example["type"])
def test_message_is_what_the_server_takes(example: dict[str, Any]) -> None:
    message = parse_message(json.dumps(example))
    assert message.model_dump(exclude_unset=True) == example


def test_every_message_has_an_example_and_its_fields_in_the_table() -> None:
    table = {names(row[0])[0]: names(row[1]) for row in rows(section(TEXT, websocket_heading()))}
    types = {
        get_args(t.model_fields["type"].annotation)[0]: t for t in get_args(get_args(Message)[0])
    }
    assert {example["type"] for example in MESSAGES} == table.keys() == types.keys()
    for name, message in types.items():
        fields = set(message.model_fields) - {"type"}
        if message is Generate:  # "and the sampling fields above", named by the first and the last
            fields -= set(Sampling.model_fields) - {"max_tokens", "ignore_eos"}
        assert set(table[name]) == fields, name
    assert {"text", "tokens"} < set(Append.model_fields)


def test_table_has_every_field_of_a_completion() -> None:
    fields = [n for row in rows(section(TEXT, "HTTP")) if len(row) == 3 for n in names(row[0])]
    assert sorted(fields) == sorted(CompletionBody.model_fields)


def test_table_has_every_default_of_sampling() -> None:
    defaults = {n: row[1] for row in rows(section(TEXT, "HTTP")) for n in names(row[0])}
    params = asdict(SamplingParams())
    numbers = {name: f"{params[name]:g}" for name in params if name in _NUMBERS}
    assert {name: defaults[name] for name in _NUMBERS} == numbers


def test_table_has_every_error_with_its_status_and_wait() -> None:
    table = {}
    for status, code, when in rows(section(TEXT, "Errors")):
        _, _, wait = when.partition("`Retry-After: ")
        table[names(code)[0]] = (int(status), int(wait.rstrip("`")) if wait else None)
    assert table == {code: (o.status, o.retry_after_s) for code, o in OUTCOMES.items()}


def test_table_has_every_route() -> None:
    table = {
        tuple(route.split())
        for row in rows(section(TEXT, "HTTP"))
        if len(row) == 2
        for route in names(row[0])
    }
    routes = {
        (method, route.path)
        for route in (*http.router.routes, *pages.router.routes)
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert table == routes - {("GET", "/")} | {("GET", "/openapi.json")}


def test_error_body_is_what_the_server_says() -> None:
    (example,) = [e for e in EXAMPLES if e.keys() == {"error"}]
    with pytest.raises(InvalidRequest) as caught:
        parse_body(CompletionBody, b'{"temperature": 3}')
    assert json.loads(error_body(caught.value)) == example


def test_completion_is_what_the_server_makes() -> None:
    (example,) = [e for e in EXAMPLES if e.get("object") == "text_completion"]
    check(Completion, example)
    (choice,) = example["choices"]
    usage = Usage(example["usage"]["prompt_tokens"], example["usage"]["completion_tokens"])
    request = Request(example["id"], "me", (1,), SamplingParams(seed=example["seed"]))
    writer = CompletionWriter(request, example["model"], example["created"])
    last = Finished(
        *(example["id"], example["session"], 1, example["position"]),
        *(choice["text"], choice["finish_reason"], usage),
    )
    assert json.loads(writer.whole([last])) == example


def test_list_of_models_has_every_detail() -> None:
    (example,) = [e for e in EXAMPLES if e.get("object") == "list"]
    check(ModelList, example)
    details = asdict(MODEL).keys() - {"name", "created_s"}
    assert example["data"][0]["everstream"].keys() == details


def test_session_routes_name_their_fields() -> None:
    answers = {
        tuple(names(row[0])): set(names(row[1]))
        for row in rows(section(TEXT, "HTTP"))
        if len(row) == 2
    }
    assert answers[("GET /v1/sessions/{session}",)] == set(SessionAnswer.model_fields)


_NUMBERS = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


def websocket_heading() -> str:
    return "WebSocket: `/v1/stream`"


def check(answer: type[BaseModel], example: dict[str, Any]) -> None:
    """Types and fields of an answer, the fields exactly."""
    assert answer.model_validate(example, strict=True).model_dump() == example


def frame(example: dict[str, Any]) -> str:
    """The frame that the server makes of the example's own values."""
    if example["type"] == "created":
        info = SessionInfo(
            example["session"], example["position"], 0, False, 0.0, example["state_bytes"]
        )
        return created_frame(example["request_id"], info)
    if example["type"] == "deleted":
        return deleted_frame(example["request_id"], example["session"])
    if example["type"] == "error":
        return error_frame(example["request_id"], SessionNotFound())
    sampling = (
        None if example["type"] == "appended" else SamplingParams(seed=example.get("seed", 0))
    )
    request = Request("socket-" + example["request_id"], "me", (1,), sampling)
    made = Work(example["request_id"], request).frame(event(example, request.request_id))
    assert made is not None
    return made


def event(example: dict[str, Any], request_id: str) -> Event:
    if example["type"] == "started":
        return Started(request_id, example["session"], example["position"])
    if example["type"] == "token":
        return TokenEvent(
            request_id, example["seq"], example["position"], example["token_id"], example["text"]
        )
    usage = Usage(example["usage"]["prompt_tokens"], example["usage"]["completion_tokens"])
    return Finished(
        request_id,
        example["session"],
        example.get("seq", 0),
        example["position"],
        example.get("text", ""),
        example.get("finish_reason"),
        usage,
    )
