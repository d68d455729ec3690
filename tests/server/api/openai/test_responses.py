"""Responses over HTTP: what they say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import sse
from server.api.openai.responses import routes
from tests.fakes import FakeEngine
from tests.server.api.openai.responding import (
    ASKED,
    PROMPT,
    ask,
    asked,
    error_of,
    events_of,
    get,
    streamed_text,
    text_of,
)
from tests.server.api.talk import at_rest, info, story, until
from tests.server.harness import Running, running

pytestmark = pytest.mark.process

ANSWER = story(len(PROMPT), 6)


async def test_answer_is_a_response_object(server: Running) -> None:
    response = await asked(server, metadata={"a": "b"}, user="u", instructions=None)
    assert response["id"].startswith("resp_")
    assert response["object"] == "response"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["metadata"], response["user"]) == ({"a": "b"}, "u")
    assert response["model"] == "fake"
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [
        {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    ]
    assert response["usage"] == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }


async def test_answer_that_the_model_ends_is_completed(server: Running) -> None:
    response = await asked(server, stop=ANSWER[3])
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert response["output"][0]["status"] == "completed"
    assert text_of(response) == ANSWER[:3]


async def test_input_may_be_items_of_every_kind(server: Running) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        },
    ]
    response = await asked(server, input=items)
    listed = (await get(server, response["id"], "/input_items", order="asc")).json()
    kinds = [item["type"] for item in listed["data"]]
    assert kinds == ["message", "message", "function_call", "function_call_output", "message"]
    assert listed["data"][1]["content"] == [{"type": "input_text", "text": "u"}]
    assert listed["data"][4]["id"] == "msg_1"
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text = f"d\n\nu\n\n{call}\n\no\n\na\n\n"
    assert response["usage"]["input_tokens"] == len(text)


async def test_stream_has_openais_events_in_order(server: Running) -> None:
    events = events_of(await ask(server, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert streamed_text(events) == ANSWER == events[-4]["text"]
    assert {event["item_id"] for event in events[3:-2]} == {events[2]["item"]["id"]}
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


async def test_stream_and_whole_answer_are_the_same_response(server: Running) -> None:
    streamed = events_of(await ask(server, stream=True))[-1]["response"]
    kept = (await get(server, streamed["id"])).json()
    assert kept == streamed
    whole = await asked(server)
    own = ("id", "created_at", "session", "output")
    assert {n: v for n, v in whole.items() if n not in own} == {
        n: v for n, v in streamed.items() if n not in own
    }
    assert text_of(whole) == text_of(streamed)


async def test_logprobs_come_where_they_are_included(server: Running) -> None:
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": True}
    events = events_of(await ask(server, **more))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    entries = [entry for event in deltas for entry in event["logprobs"]]
    assert [entry["token"] for entry in entries] == list(ANSWER)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [entry["bytes"] for entry in part["logprobs"]] == [[byte] for byte in ANSWER.encode()]
    kept = (await get(server, events[-1]["response"]["id"])).json()
    assert kept["output"][0]["content"][0] == part


async def test_fields_without_effect_are_accepted(server: Running) -> None:
    await asked(
        server,
        conversation=None,
        service_tier="auto",
        truncation="auto",
        reasoning={"effort": "none", "summary": None},
        include=["reasoning.encrypted_content", "file_search_call.results"],
        stream_options={"include_obfuscation": False},
        never_heard_of=None,
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tools=[],
        parallel_tool_calls=False,
        top_k=-1,
        min_p=0.1,
        prompt_cache_key="k",
        safety_identifier="s",
    )


async def test_response_that_is_not_stored_is_not_found(server: Running) -> None:
    response = await asked(server, store=False)
    assert (response["store"], response["session"]) == (False, None)
    assert await error_of(await get(server, response["id"])) == (404, "response_not_found", None)
    answer = await ask(server, previous_response_id=response["id"])
    code = (400, "previous_response_not_found", "previous_response_id")
    assert await error_of(answer) == code
    assert (await server.stats()).num_sessions == 0


async def test_deleted_response_is_gone_with_its_session(server: Running) -> None:
    response = await asked(server)
    answer = await server.http.delete(f"/v1/responses/{response['id']}")
    assert answer.json() == {"id": response["id"], "object": "response", "deleted": True}
    for path in ("", "/input_items"):
        assert (await get(server, response["id"], path)).status_code == 404
    assert (await server.stats()).num_sessions == 0


async def test_response_of_another_tenant_is_not_found() -> None:
    async with running(api_keys=["a" * 32, "b" * 32]) as server:
        server.http.headers["authorization"] = f"Bearer {'a' * 32}"
        response = await asked(server)
        server.http.headers["authorization"] = f"Bearer {'b' * 32}"
        path = f"/v1/responses/{response['id']}"
        for method, below in [
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
            ("GET", "?stream=true"),
        ]:
            answer = await server.http.request(method, path + below)
            assert await error_of(answer) == (404, "response_not_found", None), below
        answer = await ask(server, previous_response_id=response["id"])
        assert answer.status_code == 400


async def test_input_items_come_in_pages(server: Running) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    id = (await asked(server, input=items))["id"]
    first = (await get(server, id, "/input_items", limit=2)).json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["4", "3"]
    assert first["has_more"]
    rest = (await get(server, id, "/input_items", after=first["last_id"])).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert not rest["has_more"]
    answer = await get(server, id, "/input_items", after="nobody")
    assert await error_of(answer) == (400, "invalid_value", "after")


async def test_disconnect_ends_the_response(server: Running) -> None:
    body = {**ASKED, "max_output_tokens": 10**6, "stream": True}
    async with server.http.stream("POST", "/v1/responses", json=body) as answer:
        async for event in sse.read(answer.aiter_bytes()):
            if event.name == "response.created":
                id = event.value["response"]["id"]
                break
    await at_rest(server)
    assert (await get(server, id)).json()["status"] == "cancelled"


async def test_response_in_the_background_is_polled_and_cancelled(server: Running) -> None:
    queued = await asked(server, background=True, max_output_tokens=10**6)
    assert (queued["status"], queued["output"], queued["usage"]) == ("queued", [], None)
    await until(server, lambda stats: stats.completion_tokens_total > 10)
    running_now = (await get(server, queued["id"])).json()
    assert running_now["status"] == "in_progress"
    assert text_of(running_now)
    cancelled = (await server.http.post(f"/v1/responses/{queued['id']}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    again = (await server.http.post(f"/v1/responses/{queued['id']}/cancel")).json()
    assert again == cancelled == (await get(server, queued["id"])).json()


async def test_background_response_exceeds_the_detached_limit() -> None:
    async with running(FakeEngine(max_detached_tokens=10)) as server:
        id = (await asked(server, background=True, max_output_tokens=100))["id"]
        await at_rest(server)
        response = (await get(server, id)).json()
    assert (response["status"], text_of(response)) == ("incomplete", story(len(PROMPT), 100))


async def test_stream_that_is_read_again_is_the_same(server: Running) -> None:
    events = events_of(await ask(server, stream=True, background=True))
    id = events[0]["response"]["id"]
    assert events_of(await get(server, id, stream="true")) == events
    for number in range(len(events)):
        later = events_of(await get(server, id, stream="true", starting_after=number))
        assert later == events[number + 1 :]
    answer = await get(server, id, starting_after=3)
    assert await error_of(answer) == (400, "invalid_value", "starting_after")


async def test_running_response_is_resumed_from_the_cursor(server: Running) -> None:
    body = {**ASKED, "max_output_tokens": 3000, "stream": True, "background": True}
    async with server.http.stream("POST", "/v1/responses", json=body) as answer:
        async for event in sse.read(answer.aiter_bytes()):
            if event.name == "response.output_text.delta":
                break
            if event.name == "response.created":
                id = event.value["response"]["id"]
    later = events_of(await get(server, id, stream="true", starting_after=4))
    assert [event["sequence_number"] for event in later] == list(range(5, 5 + len(later)))
    assert later[-1]["type"] == "response.incomplete"
    assert text_of(later[-1]["response"]) == story(len(PROMPT), 3000)


async def test_same_work_under_one_key_is_done_once(server: Running) -> None:
    first, again = [await asked(server, idempotency_key="k") for _ in range(2)]
    assert first == again
    streamed = events_of(await ask(server, idempotency_key="k", stream=True))
    assert streamed[-1]["response"] == first
    assert (await server.stats()).completion_tokens_total == 6
    assert (await asked(server, idempotency_key="l"))["id"] != first["id"]


async def test_second_work_at_once_under_one_key_leaves_the_first_running(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look for what was done before, find nothing, and begin."""
    more = {"idempotency_key": "k", "max_output_tokens": 10**6}
    first = await asked(server, **more, background=True)

    async def nothing_done(*args: object) -> None:
        return None

    monkeypatch.setattr(routes, "_done_before", nothing_done)
    for stream in (False, True):
        assert (await error_of(await ask(server, **more, stream=stream)))[:2] == (409, "key_in_use")
    done = (await server.stats()).completion_tokens_total
    await until(server, lambda stats: stats.completion_tokens_total > done + 5000)
    response = (await server.http.post(f"/v1/responses/{first['id']}/cancel")).json()
    assert response["status"] == "cancelled"
    assert text_of(response).startswith(story(len(PROMPT), 5000))


async def test_response_is_a_session_of_the_other_routes_too(server: Running) -> None:
    response = await asked(server)
    assert (await info(server, response["session"]))["position"] == len(PROMPT) + 6


async def test_conversations_are_not_there_and_the_error_says_what_is(server: Running) -> None:
    for path in ("/v1/conversations", "/v1/conversations/conv_1/items"):
        answer = await server.http.post(path, json={})
        assert answer.status_code == 404
        assert "previous_response_id" in answer.json()["error"]["message"]
