"""22: a bad value in any parameter is a 4xx that names it, costs the engine nothing, harms none.

Values go over the wire as raw JSON, because Python would not write some of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.websocket import TEXT, frame
from server.api.openai.bodies import CompletionBody
from server.api.schemas.requests import Append, Generate
from server.engine.prefixes import PrefixHandle
from server.engine.session import SessionValue
from server.engine.types import Request
from tests.fakes import FakeEngine
from tests.reliability.bystander import Bystander, bystander
from tests.reliability.raw_websocket import opened
from tests.server.api.talk import field_of
from tests.server.harness import Running, running

BYSTANDERS = 1
TOO_MANY_DIGITS = "9" * 5000

NO_NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "true", "false", '"3"', '"NaN"'),
    *("[]", "{}", "[1]", '{"a": 1}', TOO_MANY_DIGITS),
)
NUMBERS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "n", "typical_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "repeat_last_n"),
    *("logprobs", "top_logprobs", "prompt_logprobs"),
)
INTEGERS = ("max_tokens", "top_k", "seed", "n", "logprobs", "top_logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "keep", "stream", "echo", "return_token_ids", "return_prefix")
NO_FLAGS = ("0", "1", '"true"', '"false"', "[]", "{}", "NaN")

RANGES = {
    "max_tokens": ("-2", "9223372036854775808", "18446744073709551616", "1000001"),
    "temperature": ("-0.1", "2.1", "-1e308", "1e308"),
    "top_k": ("-2", "2147483648", "9223372036854775808"),
    "top_p": ("1.1", "-1", "-1e-308"),
    "min_p": ("-0.1", "1.1"),
    "repetition_penalty": ("0", "-1", "11"),
    "presence_penalty": ("-2.1", "2.1"),
    "frequency_penalty": ("-2.1", "2.1"),
    "seed": ("-2", "9223372036854775808"),
    "stop": (json.dumps(["x"] * 10_000), json.dumps("x" * 1_000_000), '[""]', '""', "[1]", "1"),
    "stop_token_ids": ("[-1]", "[257]", "[2147483648]", "[true]", "[1.5]", json.dumps([1] * 65)),
    "session": ("5", "true", '""', json.dumps("s" * 65), "[]"),
    "state": ("5", "true", '""', "[]", '"../a"', '"a b"', '"a\\n"', json.dumps("s" * 65)),
    "prompt": ('""', "[]", "null", "5", "true", "{}", "[-1]", "[257]", "[4294967296]", "[1.5]"),
    "n": ("1000000000", "9223372036854775808", "0", "-1"),
    "idempotency_key": ("5", "true", '""', json.dumps("k" * 129), "[]"),
    "model": ("5", "[]", json.dumps("m" * 257)),
    **dict.fromkeys(
        ("user", "safety_identifier", "prompt_cache_key"), ("5", "{}", json.dumps("u" * 257))
    ),
    "stream_options": ('{"include_usage": 1}', '{"other": true}', '{"include_usage": true}', "1"),
    "best_of": ("1000000000",),
    "logprobs": ("1000000000", "-1", "21"),
    "top_logprobs": ("1000000000", "-1", "21"),
    "prompt_logprobs": ("1000000000", "-1", "21"),
    "typical_p": ("0", "1.1", "-1"),
    "top_n_sigma": ("100.1", "1e308"),
    "xtc_probability": ("-0.1", "1.1"),
    "xtc_threshold": ("-0.1", "1.1"),
    "dry_multiplier": ("-1", "101"),
    "dry_base": ("0", "101"),
    "dry_allowed_length": ("0", "257"),
    "dry_penalty_last_n": ("-2", "9999999999"),
    "repeat_last_n": ("-2", "9999999999"),
    "dry_sequence_breakers": ('"a"', "1", '[""]', "[1]"),
    "logit_bias": (
        *("[]", "1", '"a"', '{"a": 1}', '{"-1": 1}', '{"257": 1}', '{"1": 101}', '{"1": -101}'),
        *('{"1": NaN}', '{"1": true}', '{"1": "2"}', '{"99999999999": 1}', '{" 1": 1}'),
        json.dumps({str(n): 1 for n in range(1025)}),
    ),
    "prefix": (
        *("5", "true", '""', "[]", '"prefix_"', '"system prompt"', '"prefix_\\n"'),
        *(json.dumps(f"prefix_{data}") for data in ("A" * 43 + "=", "A" * 47, "é" * 48)),
        *(json.dumps("prefix_" + "A" * 4096), json.dumps(str(PrefixHandle(bytes(32), (257,))))),
    ),
    "speculation": ('"on"', '""', "true", "1", "[]"),
    "response_format": ('"json"', "[]", "{}", '{"type": 1}', '{"type": "json_schema"}', "true"),
}
CASES = [
    *((name, value) for name in NUMBERS for value in NO_NUMBERS),
    *((name, "1.5") for name in INTEGERS),
    *((name, value) for name in FLAGS for value in NO_FLAGS),
    *((name, value) for name, values in RANGES.items() for value in values),
]
#: Not JSON to the parser, which cannot say where.
NAMELESS = (TOO_MANY_DIGITS,)


class Watched(FakeEngine):
    """Counts what is asked of it; its steps take as long as real ones."""

    def __init__(self) -> None:
        super().__init__(before_step=lambda: time.sleep(0.002))
        self.num_submitted = 0

    def submit(self, request: Request, now: float, start: SessionValue | None = None) -> None:
        self.num_submitted += 1
        super().submit(request, now, start)


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Running, Bystander]]:
    """A server and a bystander; at the end nothing but the bystander has reached the engine."""
    engine = Watched()
    async with running(engine) as server, bystander(server.port) as other:
        yield server, other
        await other.more()
        assert engine.num_submitted == BYSTANDERS
        assert (await server.stats()).held_slots == BYSTANDERS
        answer = await server.generate(prompt="hi", max_tokens=1)
        assert answer.status_code == 200


def body(name: str, value: str) -> str:
    prompt = "" if name == "prompt" else '"prompt": "hi", '
    return f'{{{prompt}"{name}": {value}}}'


def assert_names(error: dict[str, Any], name: str, value: str) -> None:
    """The one shape, the right code, the field's name, and not the value again."""
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert len(error["message"]) < 500
    if value not in NAMELESS:
        assert field_of(error["param"]) == name, (name, value[:50], error)
        assert name in error["message"]


def test_every_parameter_is_tried() -> None:
    assert set(CompletionBody.model_fields) <= {name for name, _ in CASES}


async def test_bad_value_over_http_is_a_400_that_names_it() -> None:
    async with watched() as (server, _):
        for name, value in CASES:
            answer = await server.http.post("/v1/completions", content=body(name, value))
            assert answer.status_code == 400, (name, value[:50], answer.text)
            assert_names(answer.json()["error"], name, value)


async def test_bad_value_over_a_socket_is_an_error_that_names_it_and_the_socket_lives() -> None:
    async with watched() as (server, _), opened(server.port) as client:
        for name, value in CASES:
            if name == "stream":
                continue  # every stream is one
            message = body(name, value).replace("{", '{"type": "generate", "request_id": "a", ', 1)
            await client.send(frame(TEXT, message.encode()))
            answer = await client.receive_json()
            assert (answer["type"], answer["status"]) == ("error", 400), (name, value[:50])
            assert_names(answer["error"], name, value)
        await client.ask(type="create", request_id="b")
        created = await client.receive_json()
        assert created["type"] == "created"
        await client.ask(type="delete", request_id="c", session=created["session"])
        assert (await client.receive_json())["type"] == "deleted"


@pytest.mark.parametrize("field", ["text", "tokens"])
async def test_bad_value_of_an_append_is_a_400_that_names_it(field: str) -> None:
    values = {
        "text": ("1", "true", "[]", "{}", '""', "null"),
        "tokens": ('"a"', "1", "[]", "[-1]", "[257]", "[true]", "[NaN]"),
    }[field]
    async with watched() as (server, _), opened(server.port) as client:
        session = (await server.http.post("/v1/sessions")).json()["session"]
        for value in values:
            content = f'{{"{field}": {value}}}'
            answer = await server.http.post(f"/v1/sessions/{session}/append", content=content)
            assert answer.status_code == 400, value[:50]
            named = "text" if value == "null" else field
            assert_names(answer.json()["error"], named, value)
            before = f'{{"type": "append", "request_id": "a", "session": "{session}", '
            await client.send(frame(TEXT, (before + content[1:]).encode()))
            message = await client.receive_json()
            assert (message["type"], message["status"]) == ("error", 400), value[:50]
            assert_names(message["error"], named, value)
        await server.http.delete(f"/v1/sessions/{session}")


@pytest.mark.parametrize(
    ("type", "name"), [("fork", "n"), ("fork", "at"), ("rewind", "at"), ("resume", "last_seq")]
)
async def test_bad_count_of_a_session_is_an_error_that_names_it(type: str, name: str) -> None:
    values = (*NO_NUMBERS, "1.5", "-1", "9223372036854775808", "18446744073709551616")
    async with watched() as (server, _), opened(server.port) as client:
        session = (await server.http.post("/v1/sessions")).json()["session"]
        before = f'{{"type": "{type}", "request_id": "a", "session": "{session}", '
        for value in values:
            await client.send(frame(TEXT, f'{before}"{name}": {value}}}'.encode()))
            answer = await client.receive_json()
            assert (answer["type"], answer["status"]) == ("error", 400), value[:50]
            assert_names(answer["error"], name, value)
        await server.http.delete(f"/v1/sessions/{session}")


async def test_stop_of_a_megabyte_and_more_is_refused_by_its_size() -> None:
    async with watched() as (server, _):
        for stop in (["x" * 1000] * 1100, "x" * (1 << 20)):
            content = json.dumps({"prompt": "hi", "stop": stop})
            answer = await server.http.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"


async def test_field_that_the_server_does_not_know_is_named() -> None:
    known = set(Generate.model_fields) | set(Append.model_fields) | set(CompletionBody.model_fields)
    unknown = ("min_length", "logit_biases", "functions", "Prompt", "max_token", "prompt ")
    assert not known & set(unknown)
    async with watched() as (server, _):
        for name in unknown:
            answer = await server.http.post("/v1/completions", content=body(name, "1"))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == name
