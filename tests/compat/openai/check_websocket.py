"""Responses over a WebSocket, as the package connects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import OpenAIError
from served import MODEL, PROMPT, async_client, client
from websockets.exceptions import InvalidStatus

LAST = ("response.completed", "response.incomplete", "response.failed", "error")


def one_response(connection: Any) -> list[Any]:
    """The events of the response that is next."""
    events = []
    for event in connection:
        events.append(event)
        if event.type in LAST:
            break
    return events


def test_responses_follow_on_one_socket() -> None:
    with client() as api, api.responses.connect() as connection:
        connection.response.create(model=MODEL, input=PROMPT, max_output_tokens=8)
        first = one_response(connection)
        assert [event.sequence_number for event in first] == list(range(len(first)))
        connection.response.create(
            model=MODEL,
            input="And then?",
            previous_response_id=first[-1].response.id,
            max_output_tokens=8,
        )
        second = one_response(connection)
    assert first[0].type == "response.created"
    assert second[-1].response.previous_response_id == first[-1].response.id
    deltas = [event for event in second if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == second[-1].response.output_text
    for event in deltas:
        assert event.item_id
        assert (event.output_index, event.content_index) == (0, 0)


def test_events_are_those_of_http() -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": PROMPT,
        "max_output_tokens": 8,
        "temperature": 0,
    }
    with client() as api:
        over_http = [event.type for event in api.responses.create(**asked, stream=True)]
        with api.responses.connect() as connection:
            connection.response.create(**asked)
            over_socket = [event.type for event in one_response(connection)]
    assert over_socket == over_http


def test_mistake_is_an_error_event_and_the_socket_stays() -> None:
    with client() as api, api.responses.connect() as connection:
        connection.response.create(model=MODEL, input=PROMPT, temperature=9)
        (error,) = one_response(connection)
        assert error.type == "error"
        assert error.status == 400
        assert error.error.param == "temperature"
        connection.response.create(model=MODEL, input=PROMPT, max_output_tokens=2)
        assert one_response(connection)[-1].type == "response.incomplete"


def test_handlers_are_called() -> None:
    seen: list[str] = []
    with client() as api, api.responses.connect() as connection:

        def ended(event: Any) -> None:
            seen.append(event.type)
            connection.close()

        connection.on("response.incomplete", ended)
        connection.on("response.output_text.delta", lambda event: seen.append(event.type))
        connection.response.create(model=MODEL, input=PROMPT, max_output_tokens=3)
        connection.dispatch_events()
    assert seen == ["response.output_text.delta"] * 3 + ["response.incomplete"]


def test_async_client_connects() -> None:
    async def ask() -> list[str]:
        async with async_client() as api, api.responses.connect() as connection:
            await connection.response.create(model=MODEL, input=PROMPT, max_output_tokens=3)
            types = []
            async for event in connection:
                types.append(event.type)
                if event.type in LAST:
                    break
            return types

    assert asyncio.run(ask())[-1] == "response.incomplete"


def test_wrong_key_is_refused_before_the_socket_opens() -> None:
    with (
        client("wrong") as api,
        pytest.raises((InvalidStatus, OpenAIError)),
        api.responses.connect(),
    ):
        pytest.fail("the socket opened")
