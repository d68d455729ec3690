"""Every bad input is a 4xx that names the field, costs the engine nothing and harms no other."""

from __future__ import annotations

import codecs
import json
from typing import Any

import httpx
import pytest

from server.config import ServerConfig
from tests.server.api.openai.responding import socket_of
from tests.server.api.talk import field_of, kept
from tests.server.harness import Running, receive, running

NUMBERS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "typical_p", "top_logprobs"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
)
SAMPLING = (
    *(*NUMBERS, "stop", "stop_token_ids", "ignore_eos", "logit_bias", "response_format"),
    "dry_sequence_breakers",
)
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "true", '"3"', "[]", "{}", "9" * 5000)

BAD_VALUES = [
    *((name, value) for name in NUMBERS for value in NOT_NUMBERS),
    *(("max_tokens", value) for value in ("-2", "9223372036854775808", "1.5", "1000001")),
    *(("temperature", value) for value in ("-0.1", "2.1")),
    *(("top_k", value) for value in ("-2", "1.5", "99999999999")),
    *(("top_p", value) for value in ("1.1", "-0.1")),
    *(("min_p", value) for value in ("-0.1", "1.1")),
    *(("typical_p", value) for value in ("0", "1.1")),
    ("top_n_sigma", "100.1"),
    *((name, value) for name in ("xtc_probability", "xtc_threshold") for value in ("-0.1", "1.1")),
    *(("dry_multiplier", value) for value in ("-0.1", "100.1")),
    *(("dry_base", value) for value in ("0.9", "100.1")),
    *(("dry_allowed_length", value) for value in ("0", "257", "1.5")),
    *(("dry_penalty_last_n", value) for value in ("-2", "1.5")),
    *(("dry_sequence_breakers", value) for value in ('"a"', '[""]', "[1]", '["a", null]')),
    *(("top_logprobs", value) for value in ("-1", "21", "1.5")),
    *(("logit_bias", value) for value in ("[]", "1", '{"a": 1}', '{"257": 1}', '{"1": "1"}')),
    *(("logit_bias", value) for value in ('{"-1": 1}', '{"1": 101}', '{"1": NaN}', '{"1": true}')),
    *(("response_format", value) for value in ('"json"', "[]", "{}", '{"type": "yaml"}')),
    *(("repetition_penalty", value) for value in ("0", "-1", "11")),
    *(("presence_penalty", value) for value in ("-2.1", "2.1")),
    *(("frequency_penalty", value) for value in ("-2.1", "2.1")),
    *(("seed", value) for value in ("-2", "9223372036854775808", "1.5")),
    ("stop", json.dumps(["x"] * 10_000)),
    ("stop", json.dumps("x" * 900_000)),
    ("stop", json.dumps([""])),
    ("stop", '""'),
    ("stop", "[1]"),
    ("stop", "1"),
    ("stop_token_ids", "[-1]"),
    ("stop_token_ids", "[257]"),
    ("stop_token_ids", "[true]"),
    ("stop_token_ids", json.dumps([1] * 65)),
    ("ignore_eos", "1"),
    ("ignore_eos", '"true"'),
    ("stream", "1"),
    ("keep", '"yes"'),
    ("session", "5"),
    ("session", json.dumps("s" * 65)),
    ("model", "5"),
    ("user", "5"),
    ("stream_options", '{"include_usage": 1}'),
    ("stream_options", '{"other": true}'),
    ("stream_options", '{"include_usage": true}'),
    *(("n", value) for value in ("0", "-1", "129", "1000000000", "1.5", "true", '"2"', "[]")),
    *(("best_of", value) for value in ("0", "-1", "129", "1.5", "true", '"2"')),
    *(("idempotency_key", value) for value in ('""', "5", "[]", json.dumps("k" * 129))),
    ("logprobs", "true"),
    ("logprobs", "21"),
    ("echo", "1"),
    ("suffix", '"x"'),
    ("unknown", "0"),
    ("k" * 100_000, "0"),
]

BAD_PROMPTS = (
    *("1", "true", "{}", '""', "[]", "null", "[-1]", "[257]", "[2147483648]", "[1.5]", "[true]"),
    *('["a", 1]', "[[257]]", '["1", ""]', "[[[1]]]", "[[]]", f"[{'9' * 5000}]", "[NaN]"),
)

NOT_OBJECTS = (
    *("", "nonsense", "[]", "null", '"text"', "{", '{"prompt": "hi"} x', "[" * 100_000),
    *('{"prompt": ' + "[" * 100_000, "\ufeff{}"),
)


#: By the verb of a session's route: a body, and the field at fault.
BAD_BODIES: dict[str, list[tuple[str, str | None]]] = {
    "append": [
        ("{}", "text"),
        ('{"text": ""}', "text"),
        ('{"tokens": []}', "tokens"),
        ('{"text": 5}', "text"),
        ('{"tokens": [257]}', "tokens"),
        ('{"tokens": "a"}', "tokens"),
        ('{"text": "a", "tokens": [1]}', "tokens"),
        ('{"text": "a", "other": 1}', "other"),
        ('{"text": "a", "logprobs": 1}', "logprobs"),
        ('{"text": "a", "logprobs": "yes"}', "logprobs"),
        ('{"text": "a", "idempotency_key": ""}', "idempotency_key"),
        ('{"text": "a", "idempotency_key": 5}', "idempotency_key"),
        ("[]", None),
    ],
    "fork": [
        *((f'{{"n": {value}}}', "n") for value in ("0", "-1", "1025", "1.5", "true", '"2"', "[]")),
        *((f'{{"at": {value}}}', "at") for value in ("-1", "1.5", "true", '"2"', "1e999", "NaN")),
        ('{"other": 1}', "other"),
        ("[]", None),
    ],
    "rewind": [
        ("{}", "at"),
        *((f'{{"at": {value}}}', "at") for value in ("-1", "1.5", "true", '"2"', "null", "NaN")),
        ('{"at": 9007199254740993}', "at"),
        ('{"at": 0, "n": 1}', "n"),
        ("[]", None),
    ],
}

BAD_QUERIES: dict[str, list[tuple[str, str]]] = {
    "/v1/sessions": [("limit", value) for value in ("0", "-1", "1001", "x", "1.5", "1_0", "")],
    "/v1/sessions/{session}/events": [
        *(("starting_after", value) for value in ("-1", "x", "1.5", "9" * 30, "")),
        *(("take_over", value) for value in ("maybe", "1", "")),
        *(("epoch", value) for value in ("", "e" * 65)),
        ("after_seq", "5"),
    ],
}

BAD_FRAMES: list[tuple[str, str, dict[str, Any]]] = [
    ("resume", "last_seq", {}),
    *(
        ("resume", "last_seq", {"last_seq": value})
        for value in (-1, 1.5, "1", True, None, 2**53 + 1)
    ),
    *(("resume", "epoch", {"last_seq": 0, "epoch": value}) for value in ("", 5, "e" * 65)),
    ("resume", "take_over", {"last_seq": 0, "take_over": 1}),
    ("resume", "session", {"last_seq": 0, "session": None}),
    ("resume", "session", {"last_seq": 0, "session": "s" * 65}),
    ("resume", "other", {"last_seq": 0, "other": 1}),
    ("detach", "session", {}),
    ("fork", "session", {"session": ""}),
    ("rewind", "session", {"session": 5, "at": 0}),
    ("generate", "idempotency_key", {"prompt": "hi", "idempotency_key": "k" * 129}),
    ("generate", "n", {"prompt": "hi", "n": 2}),
    ("generate", "max_tokens", {"prompt": "hi", "max_tokens": 0}),
    ("generate", "prompt", {"prompt": ["hi", "you"]}),
    ("generate", "echo", {"prompt": "hi", "echo": True}),
    ("generate", "take_over", {"prompt": "hi", "take_over": True}),
]


def message(kind: str, **fields: Any) -> str:
    return json.dumps({"type": kind, "request_id": "a", **fields})


async def post(server: Running, body: str | bytes) -> httpx.Response:
    return await server.http.post("/v1/completions", content=body)


async def assert_unharmed(server: Running) -> None:
    stats = await server.stats()
    assert (stats.prompt_tokens_total, stats.held_slots) == (0, 0)
    assert (await server.generate(prompt="hi", max_tokens=1)).status_code == 200


def problem(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_value"
    assert len(error["message"]) < 500
    return error


async def test_bad_value_is_a_400_that_names_its_field(server: Running) -> None:
    for name, value in BAD_VALUES:
        error = problem(await post(server, f'{{"prompt": "hi", "{name}": {value}}}'))
        too_long = value == "9" * 5000  # not JSON to the parser, which does not say where
        name = name[:64]
        assert too_long or (error["param"].startswith(name) and name in error["message"]), (
            name,
            value,
        )
    await assert_unharmed(server)


async def test_bad_prompt_is_a_400_that_names_the_prompt(server: Running) -> None:
    for value in BAD_PROMPTS:
        error = problem(await post(server, f'{{"prompt": {value}}}'))
        assert field_of(error["param"]) == "prompt" or "9" * 5000 in value, (value[:50], error)
    assert problem(await post(server, "{}"))["param"] == "prompt"
    await assert_unharmed(server)


async def test_body_that_is_no_json_object_is_a_400(server: Running) -> None:
    for body in NOT_OBJECTS:
        problem(await post(server, body))
    await assert_unharmed(server)


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}']
)
async def test_text_that_is_no_unicode_is_a_400(server: Running, body: bytes) -> None:
    problem(await post(server, body))
    await assert_unharmed(server)


async def test_nul_is_a_character_like_any_other(server: Running) -> None:
    response = await post(server, b'{"prompt": "a\\u0000b", "max_tokens": 1}')
    assert response.json()["usage"]["prompt_tokens"] == 3


#: They read no field of their body that could be wrong.
WITHOUT_FIELDS = {"/api/pull"}


def param_of(answer: httpx.Response) -> str | None:
    """The field at fault, in the form of any of the APIs."""
    error = answer.json()
    found: str | None = (error if isinstance(error["error"], str) else error["error"])["param"]
    return found


async def test_byte_order_mark_before_a_body_is_read_on_every_route(server: Running) -> None:
    """Windows puts it there: all that is wrong with these bodies is their field."""
    session, bom, body = await kept(server, 1), codecs.BOM_UTF8, b'{"mood": "glad"}'
    document = (await server.http.get("/openapi.json")).json()
    found = 0
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in content or path in WITHOUT_FIELDS:
            continue
        found += 1
        url = path.replace("{session}", session)
        answer = await server.http.post(url, content=bom + body)
        assert (url, answer.status_code, param_of(answer)) == (url, 400, "mood")
    assert found > 8
    answer = await server.http.post("/v1/completions", content=bom + b'{"prompt": "hi"}')
    assert answer.status_code == 200


@pytest.mark.process  # a template is rendered
async def test_byte_order_mark_before_a_frame_is_read(server: Running) -> None:
    async with server.socket() as socket:
        await socket.send('\ufeff{"type": "create", "request_id": "a"}')
        assert (await receive(socket))["type"] == "created"
    async with socket_of(server) as socket:
        await socket.send('\ufeff{"type": "response.create", "input": "hi", "stream_id": "s"}')
        assert json.loads(await socket.recv())["stream_id"] == "s"


async def test_error_does_not_repeat_what_the_client_sent(server: Running) -> None:
    body = '{"prompt": "hi", "temperature": "my secret"}'
    assert "secret" not in (await post(server, body)).text


async def test_body_over_the_limit_is_a_413_declared_or_not(server: Running) -> None:
    body = b'{"prompt": "' + b"a" * ServerConfig().max_body_bytes + b'"}'

    async def chunks():  # type: ignore[no-untyped-def]
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    for content in (body, chunks()):
        response = await server.http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
    await assert_unharmed(server)


async def test_session_routes_refuse_bad_bodies(server: Running) -> None:
    problem(await server.http.post("/v1/sessions", json={"keep": True}))
    problem(await server.http.post("/v1/sessions", content="[]"))
    session = (await server.http.post("/v1/sessions")).json()["session"]
    for verb, bodies in BAD_BODIES.items():
        for body, param in bodies:
            response = await server.http.post(f"/v1/sessions/{session}/{verb}", content=body)
            assert problem(response)["param"] == param, (verb, body)
    found = (await server.http.get(f"/v1/sessions/{session}")).json()
    assert (found["position"], found["seq"]) == (0, 0)
    await server.http.delete(f"/v1/sessions/{session}")
    await assert_unharmed(server)


async def test_bad_query_is_a_400_that_names_its_field(server: Running) -> None:
    session = (await server.http.post("/v1/sessions")).json()["session"]
    for path, queries in BAD_QUERIES.items():
        for name, value in queries:
            response = await server.http.get(path.format(session=session), params={name: value})
            assert problem(response)["param"] == name, (path, name, value)


async def test_header_that_is_no_event_of_ours_is_a_400(server: Running) -> None:
    session = (await server.http.post("/v1/sessions")).json()["session"]
    for value in ("x", "-1", "1.5", "a-0:", "a-0:x", "a-0:-1", "a:" + "9" * 17, "a-0:²", ":"):
        response = await server.http.get(
            f"/v1/sessions/{session}/events", headers={"last-event-id": value.encode()}
        )
        assert problem(response)["param"] == "Last-Event-ID", value


async def test_bad_frame_gets_an_error_and_the_socket_lives_on(server: Running) -> None:
    frames: list[tuple[str | bytes, str | None, str | None]] = [
        ("nonsense", None, None),
        ("[]", None, None),
        ("{}", "type", None),
        ('{"type": "generate"}', "request_id", None),
        ('{"type": "other", "request_id": "a"}', "type", "a"),
        ('{"type": "create", "request_id": ""}', "request_id", None),
        ('{"type": "create", "request_id": 5}', "request_id", None),
        (json.dumps({"type": "create", "request_id": "r" * 65}), "request_id", None),
        ('{"type": "create", "request_id": "a", "x": 1}', "x", "a"),
        ('{"type": "append", "request_id": "a", "text": "b"}', "session", "a"),
        ("[" * 100_000, None, None),
        ('{"type": "create", "request_id": "\\ud800"}', None, None),
        (b"\x00\x01", None, None),
        *(
            (message(kind, **{"session": "s", **fields}), param, "a")
            for kind, param, fields in BAD_FRAMES
        ),
        *(
            (f'{{"type": "{kind}", "request_id": "a", "session": "s", {body[1:]}', param, "a")
            for kind in ("fork", "rewind", "append")
            for body, param in BAD_BODIES[kind]
            if body.startswith('{"')
        ),
    ]
    frames += [
        (f'{{"type": "generate", "request_id": "a", "prompt": "hi", "{name}": {value}}}', name, "a")
        for name, value in BAD_VALUES
        if name in SAMPLING and "9" * 5000 not in value and value not in ("NaN", "Infinity")
    ]
    async with server.socket() as socket:
        for frame, param, request_id in frames:
            await socket.send(frame)
            answer = await receive(socket)
            assert answer["type"] == "error", frame[:80]
            given = answer["error"]["param"]
            assert answer["status"] == 400, frame[:80]
            assert given == param or field_of(given) == param, frame[:80]
            if "1e999" not in str(frame) and "-Infinity" not in str(frame):
                assert answer["request_id"] == request_id, frame[:80]
    await assert_unharmed(server)


async def test_limits_of_the_operator_hold() -> None:
    async with running(max_prompt_tokens=4, max_tokens_limit=8) as server:
        assert problem(await server.generate(prompt="hello"))["param"] == "prompt"
        assert problem(await server.generate(prompt="hi", max_tokens=9))["param"] == "max_tokens"
        assert (await server.generate(prompt="four", max_tokens=8)).status_code == 200
