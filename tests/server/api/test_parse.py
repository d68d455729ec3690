"""A body is parsed once, and what is wrong with it is told as by a parser of JSON."""

from __future__ import annotations

import json
import time

import pydantic
import pytest

from server.api.openai.bodies import CompletionBody, ScoreBody
from server.api.schemas.requests import AppendBody, RewindBody
from server.api.schemas.wire import parse_body
from server.api.stream import parse_message
from server.errors import InvalidRequest


def refusal(body: str | bytes, max_ids: int = 1000) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        parse_body(CompletionBody, body if isinstance(body, bytes) else body.encode(), max_ids)
    return raised.value


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ('{"prompt": 5}', "prompt", "prompt: must be a valid string"),
        ('{"prompt": {}}', "prompt", "prompt: must be a valid string"),
        ('{"prompt": [1.5]}', "prompt[0]", "prompt[0]: must be a valid integer"),
        ('{"prompt": [1, true]}', "prompt[1]", "prompt[1]: must be a valid integer"),
        ('{"prompt": ["a", 1]}', "prompt[1]", "prompt[1]: must be a valid string"),
        ('{"prompt": [[1], [2, "3"]]}', "prompt[1][1]", "prompt[1][1]: must be a valid integer"),
        ('{"prompt": [[1], 2]}', "prompt[1]", "prompt[1]: must be a valid array"),
        ('{"stop": {}}', "stop", "stop: must be a valid string"),
        ('{"stream_options": 5}', "stream_options", "stream_options: must be an object"),
        ('{"logit_bias": []}', "logit_bias", "logit_bias: must be an object"),
        ('{"stop_token_ids": "1"}', "stop_token_ids", "stop_token_ids: must be a valid array"),
        ('{"temperature": NaN}', "temperature", "temperature: must be a finite number"),
        ('{"temperature": 1e999}', "temperature", "temperature: must be a finite number"),
        ('{"seed": 99999999999999999999}', "seed", "seed: must be a valid integer"),
        ('{"n": true}', "n", "n: must be a valid integer"),
        ('{"stream": 1}', "stream", "stream: must be a valid boolean"),
        ("[]", None, "the message is not a JSON object: must be an object"),
        ("null", None, "the message is not a JSON object: must be an object"),
    ],
)
def test_errors_name_json_types(body: str, param: str | None, message: str) -> None:
    error = refusal(body)
    assert (error.param, error.message) == (param, message)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 10**6, '{"prompt": "\\ud800"}', '{"n": 1} x', "{1}"]
)
def test_invalid_json_is_reported(text: str) -> None:
    assert "invalid JSON" in refusal(text).message


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_other_encoding_is_named(encoding: str) -> None:
    assert "it is in UTF-16, not in UTF-8" in refusal("\ufeff{}".encode(encoding)).message


def test_numbers_are_as_strict_as_the_parser_of_json() -> None:
    """Pydantic looks at Python's values: where these are laxer than JSON's, this fails."""
    bodies = [
        *(f'{{"temperature": {value}}}' for value in ("1", "1.0", '"1"', "true", "null", "[]")),
        *(f'{{"max_tokens": {value}}}' for value in ("1", "1.0", '"1"', "true", "1e0", "null")),
        *(f'{{"stop": {value}}}' for value in ('"a"', '["a"]', "[1]", '{"a": 1}', "null")),
        *(f'{{"ignore_eos": {value}}}' for value in ("true", "0", '"true"', "null")),
        *(f'{{"logit_bias": {value}}}' for value in ('{"1": 1}', '{"1": "1"}', '{"a": 1}', "{}")),
        *(f'{{"stop_token_ids": {value}}}' for value in ("[1]", "[1.0]", "[true]", '["1"]')),
        '{"stream_options": {"include_usage": true}}',
        '{"stream_options": {"include_usage": 1}}',
        '{"response_format": {"type": "text"}}',
        '{"response_format": {"type": "choice", "choices": "abc"}}',
    ]
    for body in bodies:
        try:
            expected: object = CompletionBody.model_validate_json(body)
        except pydantic.ValidationError:
            refusal(body)
        else:
            assert parse_body(CompletionBody, body.encode()) == expected, body


def test_same_from_json_and_from_python_for_every_field() -> None:
    """No field has a type that a strict model takes from JSON and not from its values."""
    full = {
        "prompt": [[1, 2], [3]],
        "logit_bias": {"1": 1, "2": -1.5},
        "stop": ["a"],
        "stop_token_ids": [1],
        "stream_options": {"include_usage": True, "continuous_usage_stats": None},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    }
    text = json.dumps(full)
    assert parse_body(CompletionBody, text.encode()) == CompletionBody.model_validate_json(text)


def test_unknown_value_of_a_type_is_not_repeated() -> None:
    error = refusal('{"response_format": {"type": "my secret"}}')
    assert error.param == "response_format"
    assert "secret" not in error.message
    assert "json_schema" in error.message


@pytest.mark.parametrize(
    "prompt", [[1] * 1001, ["a"] * 1001, [[1]] * 1001, [[1] * 600, [1] * 600]], ids=str
)
def test_too_many_items_are_refused_before_validation(prompt: list[object]) -> None:
    error = refusal(json.dumps({"prompt": prompt}))
    assert (error.param, error.message) == ("prompt", "prompt: must have at most 1000 tokens")


@pytest.mark.parametrize(
    "body",
    [
        '{"logit_bias": {' + ",".join(f'"{n}": "x"' for n in range(100_000)) + "}}",
        '{"prompt": "hi", "stop": [' + "1," * 900 + "1]}",
        '{"prompt": [' + "[true]," * 900 + "[true]]}",
        "{" + ",".join(f'"k{n}": NaN' for n in range(50_000)) + "}",
    ],
    ids=["biases", "stops", "batch", "unknown and no numbers"],
)
def test_thousands_of_mistakes_are_reported_as_one(body: str) -> None:
    start = time.process_time()
    assert len(refusal(body).message) < 200
    assert time.process_time() - start < 0.2


def test_only_what_a_body_declares_is_in_it() -> None:
    assert parse_body(AppendBody, b'{"text": "a"}').text == "a"
    for model, body in ((AppendBody, b'{"n": 1}'), (RewindBody, b'{"at": 1, "prompt": 2}')):
        with pytest.raises(InvalidRequest, match="there is no such field"):
            parse_body(model, body)
    with pytest.raises(InvalidRequest, match="continuations"):
        parse_body(ScoreBody, b'{"prompt": "a", "continuations": []}')


def test_frame_of_an_unknown_type_gets_the_known_types() -> None:
    with pytest.raises(InvalidRequest, match="must be one of create, generate"):
        parse_message('{"type": "other", "request_id": "a"}')
