"""Messages: whole, streamed, with stop sequences, schemas, counts; errors; the list of models."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel, ConfigDict
from served import MODEL, QUESTION, async_client, client

SEED = {"extra_body": {"seed": 4, "temperature": 0.5}}


class Pet(BaseModel):
    """What the model must write, however little it knows of pets."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    fur: Literal["short", "long"]


def test_message_has_text_and_usage() -> None:
    with client() as api:
        answer = api.messages.create(
            model=MODEL,
            max_tokens=8,
            system="You tell stories.",
            messages=QUESTION,
            metadata={"user_id": "me"},
        )
    (block,) = answer.content
    assert block.type == "text" and block.text
    assert (answer.role, answer.stop_reason) == ("assistant", "max_tokens")
    assert answer.usage.output_tokens == 8
    assert answer.usage.input_tokens > 10
    assert answer._request_id


def test_stream_says_what_the_whole_answer_says() -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 30, "messages": QUESTION, **SEED}
    with client() as api:
        whole = api.messages.create(**asked)
        with api.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    read = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert read == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def _raw_events() -> list[str]:
    async with async_client() as api:
        stream = await api.messages.create(
            model=MODEL, max_tokens=4, messages=QUESTION, stream=True
        )
        return [event.type async for event in stream]


def test_events_come_in_their_order() -> None:
    first, second, *deltas, closed, last, end = asyncio.run(_raw_events())
    assert (first, second) == ("message_start", "content_block_start")
    assert set(deltas) == {"content_block_delta"}
    assert (closed, last, end) == ("content_block_stop", "message_delta", "message_stop")


def test_stop_sequence_is_named() -> None:
    with client() as api:
        answer = api.messages.create(
            model=MODEL, max_tokens=400, messages=QUESTION, stop_sequences=[".", "!", "?"], **SEED
        )
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence in (".", "!", "?")
    assert answer.stop_sequence not in answer.content[0].text


def test_parse_gives_what_the_schema_says() -> None:
    with client() as api:
        answer = api.messages.parse(
            model=MODEL, max_tokens=100, messages=QUESTION, output_format=Pet
        )
    assert isinstance(answer.parsed_output, Pet)


def test_count_is_what_is_read() -> None:
    asked: dict[str, Any] = {"model": MODEL, "system": "You count.", "messages": QUESTION}
    with client() as api:
        counted = api.messages.count_tokens(**asked).input_tokens
        usage = api.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_answer_continues_the_assistants_words() -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "Once upon"}]
    with client() as api:
        answer = api.messages.create(model=MODEL, max_tokens=8, messages=turns)
    assert answer.content[0].text


def test_models_are_listed() -> None:
    with client() as api:
        (model,) = list(api.models.list())
        assert (model.id, model.type) == (MODEL, "model")
        assert api.models.retrieve(MODEL).id == MODEL


def test_token_is_a_key_as_well() -> None:
    with client(key=None, auth_token="usual") as api:  # type: ignore[arg-type]
        assert api.messages.create(model=MODEL, max_tokens=1, messages=QUESTION).content


@pytest.mark.parametrize(
    ("key", "body", "error", "kind"),
    [
        ("wrong", {}, anthropic.AuthenticationError, "authentication_error"),
        ("reader", {}, anthropic.PermissionDeniedError, "permission_error"),
        ("usual", {"model": "none"}, anthropic.NotFoundError, "not_found_error"),
        ("usual", {"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error"),
        (
            "usual",
            {"extra_body": {"temprature": 1}},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
    ],
)
def test_errors_are_the_packages_own(
    key: str, body: dict[str, Any], error: type[anthropic.APIStatusError], kind: str
) -> None:
    asked = {"model": MODEL, "max_tokens": 1, "messages": QUESTION, **body}
    with client(key) as api, pytest.raises(error) as caught:
        api.messages.create(**asked)
    assert caught.value.request_id
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == kind
