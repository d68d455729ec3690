"""Every example and table in protocol.md and errors.md is what the server says and takes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, cast, get_args, get_type_hints

import pytest
from pydantic import TypeAdapter
from starlette.routing import Route

from benchmarks import sse
from server.api.app import ROUTERS
from server.api.errors import OUTCOMES, error_body
from server.api.events import FrameWriter, created_frame, encode, error_frame, resumed_frame
from server.api.openai.bodies import CompletionBody
from server.api.openai.completions import Completion, CompletionWriter
from server.api.schemas.requests import (
    MESSAGE_TYPES,
    Append,
    AppendBody,
    ForkBody,
    Generate,
    Message,
    RewindBody,
    Sampling,
)
from server.api.schemas.responses import (
    AnyFrame,
    Appended,
    Forked,
    ModelList,
    SessionAnswer,
    SessionCreated,
    SessionDeleted,
    SessionList,
)
from server.api.schemas.wire import parse_body
from server.api.stream import parse_message
from server.engine.types import (
    Event,
    Finished,
    Migrated,
    Request,
    SamplingParams,
    SessionInfo,
    Started,
    TokenEvent,
    Usage,
)
from server.errors import InvalidRequest, SessionNotFound
from server.sessions.loader import Resumed
from tests.docs.pages import json_examples, names, page, rows, section
from tests.fakes import MODEL

TEXT = page("protocol.md")
EXAMPLES = json_examples(TEXT)
FRAMES = [e for e in EXAMPLES if "type" in e and e["type"] not in MESSAGE_TYPES]
MESSAGES = [e for e in EXAMPLES if e.get("type") in MESSAGE_TYPES]


@pytest.mark.parametrize("example", FRAMES, ids=lambda example: example["type"])
def test_frame_is_what_the_server_makes(example: dict[str, Any]) -> None:
    made = json.loads(frame(example))
    assert made == example
    assert list(made) == list(example)


def test_every_frame_has_an_example() -> None:
    kinds = [get_type_hints(each)["type"] for each in get_args(get_args(AnyFrame)[0])]
    described = {get_args(kind)[0] for kind in kinds}
    assert {example["type"] for example in FRAMES} == described
    assert {example["type"] for example in FRAMES if "logprob" in example} == {"token"}


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
    assert tuple(table) == MESSAGE_TYPES
    for name, message in types.items():
        fields = set(message.model_fields) - {"type"}
        if message is Generate:  # "and the sampling fields above", named by the first and the last
            fields -= set(Sampling.model_fields) - {"max_tokens", "ignore_eos"}
        assert set(table[name]) == fields, name
    assert {"text", "tokens"} < set(Append.model_fields)


def test_every_answer_of_the_table_is_a_frame() -> None:
    answers = [set(names(row[2])) for row in rows(section(TEXT, websocket_heading()))]
    kinds = {example["type"] for example in FRAMES}
    assert all(named & kinds for named in answers)
    assert set().union(*answers) - {"cancelled"} == kinds - {"error", "migrate"}


def test_table_has_every_field_of_the_routes_of_sessions() -> None:
    table = section(TEXT, "HTTP").partition(SESSIONS)[2]
    found = {(names(row[0])[0], name) for row in rows(table) for name in names(row[1])}
    bodies = {"append": AppendBody, "fork": ForkBody, "rewind": RewindBody}
    assert found == {(verb, name) for verb, body in bodies.items() for name in body.model_fields}


def test_table_has_every_error_with_its_status_and_wait() -> None:
    table = {}
    for status, code, _, todo in rows(section(page("errors.md"), "HTTP and WebSocket")):
        wait = re.search(r"`Retry-After: (\d+)`", todo)
        table[names(code)[0]] = (int(status), int(wait[1]) if wait else None)
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
        for router in ROUTERS
        for route in router.routes
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
    writer = CompletionWriter((request,), example["model"], example["created"])
    last = Finished(
        *(example["id"], example["session"], 1, example["position"]),
        *(choice["text"], choice["finish_reason"], usage),
    )
    writer.add(last)
    assert json.loads(b"".join(writer.whole())) == example


def test_list_of_models_has_every_detail() -> None:
    (example,) = [e for e in EXAMPLES if e.get("object") == "list" and "has_more" not in e]
    check(ModelList, example)
    hidden = {"name", "created_s", "bos_token_id", "hidden_size"}
    details = (asdict(MODEL).keys() - hidden) | {"sampling", "chat", "thinking"}
    assert example["data"][0]["everstream"].keys() == details


def test_session_routes_name_their_fields() -> None:
    answers = {
        names(row[0])[0].removeprefix("GET ").removeprefix("POST "): names(row[1].split("->")[-1])
        for row in rows(section(TEXT, "HTTP"))
        if len(row) == 2
    }
    path = "/v1/sessions/{session}"
    for route, answer in (
        (path, SessionAnswer),
        ("/v1/sessions/import", SessionCreated),
        (f"{path}/append", Appended),
        (f"{path}/fork", Forked),
        (f"DELETE {path}", SessionDeleted),
    ):
        wanted = set(answer.__annotations__)
        named = set(answers[route])
        assert named - {"cancelled"} == wanted, route


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (SessionAnswer, "idle_s"),
        (SessionList, "has_more"),
        (Forked, "sessions"),
        (Appended, "logprobs"),
    ],
)
def test_answer_of_a_session_route_is_what_the_server_says(answer: type, field: str) -> None:
    (example,) = [e for e in EXAMPLES if "type" not in e and field in e]
    check(answer, example)


def test_streams_are_what_the_server_sends() -> None:
    blocks = re.findall(r"^```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    completion, session = (_sse(block) for block in blocks)
    (_, opening), (id, chunk) = completion
    assert id is not None
    epoch, _, seq = id.rpartition(":")
    store, _, number = epoch.rpartition("-")
    request = Request(
        chunk["id"], "me", (1,), SamplingParams(seed=chunk["seed"]), opening["session"], keep=True
    )
    name = (store + "-{}").format
    writer = CompletionWriter((request,), chunk["model"], chunk["created"], name)
    text, place = chunk["choices"][0]["text"], chunk["position"]
    made = writer.chunks(
        Started(request.request_id, opening["session"], opening["position"], int(number))
    ) + writer.chunks(TokenEvent(request.request_id, int(seq), place, 5, text))
    assert _sse(made.decode()) == completion
    (_, resumed), (id, token) = session
    assert json.loads(frame(resumed)) == resumed
    assert json.loads(frame(token)) == token
    assert id == f"{resumed['epoch']}:{token['seq']}"


SESSIONS = "### Sessions over HTTP"


def _sse(text: str) -> list[tuple[str | None, dict[str, Any]]]:
    """The ids and values of server-sent events."""
    return [(event.id, event.value) for event in sse.events_of(text.strip() + "\n\n")]


def websocket_heading() -> str:
    return "WebSocket: `/v1/stream`"


def check(answer: type, example: dict[str, Any]) -> None:
    """Types and fields of an answer, the fields exactly."""
    assert TypeAdapter(answer).validate_python(example, strict=True) == example


def frame(example: dict[str, Any]) -> bytes:
    """The frame that the server makes of the example's own values."""
    kind, request_id = example["type"], example["request_id"]
    if kind == "created":
        info = SessionInfo(
            example["session"], example["position"], 0, False, 0.0, example["state_bytes"]
        )
        return created_frame(request_id, info, lambda epoch: example["epoch"])
    if kind in ("resumed", "reset"):
        info = SessionInfo(
            example["session"], example["position"], example["last_seq"], example["busy"], 0.0, 0
        )
        resumed = Resumed(info, example["seq"], example.get("reason"))
        return resumed_frame(request_id, resumed, lambda epoch: example["epoch"])
    if kind in ("deleted", "forked", "rewound", "detached"):
        TypeAdapter(AnyFrame).validate_python(example)
        return encode(cast(AnyFrame, example))
    if kind == "error":
        return error_frame(request_id, SessionNotFound())
    sampling = None if kind == "appended" else SamplingParams(seed=example.get("seed", 0))
    request = Request("socket-" + request_id, "me", (1,), sampling)
    writer = FrameWriter(request_id, request, lambda epoch: example["epoch"])
    made = writer.frame(event(example, request.request_id))
    assert made is not None
    return made


def event(example: dict[str, Any], request_id: str) -> Event:
    session, seq, position = example.get("session"), example.get("seq", 0), example["position"]
    if example["type"] == "started":
        return Started(request_id, str(session), position, seq=seq)
    if example["type"] == "token":
        top = tuple((one["token_id"], one["logprob"]) for one in example.get("top_logprobs", ()))
        token = TokenEvent(request_id, seq, position, example["token_id"], example["text"])
        return token._replace(logprob=example.get("logprob"), top=top)
    if example["type"] == "migrate":
        return Migrated(request_id, str(session), 0, seq, position)
    usage = Usage(example["usage"]["prompt_tokens"], example["usage"]["completion_tokens"])
    logprobs = tuple(example["logprobs"]) if "logprobs" in example else None
    text, reason = example.get("text", ""), example.get("finish_reason")
    return Finished(request_id, session, seq, position, text, reason, usage, None, logprobs)
