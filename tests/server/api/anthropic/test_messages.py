"""`POST /v1/messages` over a fake engine, which reads and writes bytes."""

from __future__ import annotations

import pytest

from model.chat import ChatTemplate
from tests.fakes import EOS, FakeEngine, told_after
from tests.server.api.anthropic.talking import HI, NUM_HI, ask, collected, events_of, message
from tests.server.api.talk import story
from tests.server.harness import Recorder, Running, running

pytestmark = pytest.mark.process

ROLES = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


async def test_json_answer_has_anthropics_shape(server: Running) -> None:
    answer = await ask(server)
    found = answer.json()
    assert answer.status_code == 200
    assert found.pop("id").startswith("msg_")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": story(NUM_HI, 20)}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": NUM_HI,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 20,
        },
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "x-everstream-ignored" not in answer.headers


async def test_stream_puts_together_to_the_whole_answer() -> None:
    engine = FakeEngine(story=told_after(NUM_HI, 'Hello, "you"!\nBye'))
    async with running(engine) as server:
        whole = await message(server, max_tokens=100)
        events = events_of(await ask(server, stream=True, max_tokens=100))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    found = collected(events)
    assert {**found, "id": ""} == {**whole, "id": ""}
    assert found["content"] == [{"type": "text", "text": 'Hello, "you"!\nBye'}]
    assert found["stop_reason"] == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequence_is_named(stream: bool) -> None:
    engine = FakeEngine(story=told_after(NUM_HI, "one two three"))
    async with running(engine) as server:
        for stops, text, stop in (
            (["three", "two"], "one ", "two"),
            (["wo t", "t"], "one ", "t"),
            (["four"], "one two three", None),
        ):
            answer = await ask(server, stream=stream, stop_sequences=stops, max_tokens=100)
            found = collected(events_of(answer)) if stream else answer.json()
            assert found["content"] == [{"type": "text", "text": text}]
            reason = "end_turn" if stop is None else "stop_sequence"
            assert (found["stop_reason"], found["stop_sequence"]) == (reason, stop)


async def test_sampling_arrives() -> None:
    engine = Recorder()
    async with running(engine) as server:
        await message(server, temperature=0.5, top_p=0.75, top_k=7, stop_sequences=["x"])
    (sampling,) = engine.sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 7)
    assert (sampling.max_tokens, "x" in sampling.stop) == (20, True)


async def test_zero_tokens_only_read_the_prompt(server: Running) -> None:
    found = await message(server, max_tokens=0)
    assert (found["content"], found["stop_reason"]) == ([], "max_tokens")
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (NUM_HI, 0)
    assert collected(events_of(await ask(server, max_tokens=0, stream=True)))["content"] == []


async def counted(server: Running, **body: object) -> int:
    answer = await server.http.post("/v1/messages/count_tokens", json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


async def test_tokens_are_counted_as_they_are_read() -> None:
    async with running(chat_template=ROLES) as server:
        for body in (
            {},
            {"system": "Be nice."},
            {"messages": [*HI, {"role": "assistant", "content": "Hello"}]},
        ):
            usage = (await message(server, **body))["usage"]
            assert await counted(server, **body) == usage["input_tokens"], body
        assert await counted(server) == len("user: hi\nassistant: ")


async def test_line_of_billing_is_left_out() -> None:
    """Claude Code's first line of the system differs each time: no prompt would be a beginning."""
    line = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0a1b2;"
    async with running(chat_template=ROLES) as server:
        plain = await counted(server, system="Be nice.")
        assert await counted(server, system=f"{line}\nBe nice.") == plain
        blocks = [{"type": "text", "text": text} for text in (line, "Be nice.")]
        assert await counted(server, system=blocks) == plain
        assert await counted(server, system=line) == await counted(server)
        answer = await ask(server, system=blocks)
        assert answer.headers["x-everstream-ignored"] == "x-anthropic-billing-header"
        assert await counted(server, system=f"Be nice.\n{line}") > plain


async def test_harmless_fields_are_listed(server: Running) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    answer = await ask(
        server,
        metadata={"user_id": "me"},
        service_tier="auto",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **mark}]}],
        system=[{"type": "text", "text": "a", **mark}],
        tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-everstream-ignored"].split(", ") == [
        "cache_control",
        "metadata",
        "output_config.effort",
        "service_tier",
        "thinking",
        "tools.web_search_20250305",
    ]


async def test_list_in_the_header_is_bounded(server: Running) -> None:
    tools = [{"type": f"other_{number:04}"} for number in range(512)]
    answer = await ask(server, max_tokens=1, tools=tools)
    shown = answer.headers["x-everstream-ignored"].split(", ")
    assert shown == [f"tools.{tool['type']}" for tool in tools[:64]]


HARMLESS: dict[str, object] = {
    "billing_policy": {"type": "standard"},
    "cache_control": {"type": "ephemeral"},
    "compaction": {"type": "auto"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None},
    "fallback_credit_token": "t",
    "fallbacks": [{"model": "other"}],
    "inference_geo": "eu",
    "metadata": {"user_id": "me"},
    "service_tier": "standard_only",
    "speed": "fast",
    "user_profile_id": "u",
    "workspace_id": "w",
}


@pytest.mark.parametrize("name", HARMLESS)
async def test_harmless_field_is_named(server: Running, name: str) -> None:
    answer = await ask(server, max_tokens=1, **{name: HARMLESS[name]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-everstream-ignored"] == name
    absent = await ask(server, max_tokens=1, **{name: None})
    assert "x-everstream-ignored" not in absent.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"stop": ["a"]}, "stop"),
        ({"n": 2}, "n"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]}, "mcp_servers"),
        ({"temprature": 1}, "temprature"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "tool", "name": "a"}, "tools": []}, None),
        ({"output_format": {"type": "json_schema", "schema": {"type": 5}}}, "output_config.format"),
    ],
)
async def test_bad_field_is_named(server: Running, body: dict[str, object], param: str) -> None:
    answer = await ask(server, **body)
    if param is None:
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert error["param"] == param
    assert answer.json()["type"] == "error"


@pytest.mark.parametrize(
    "kind", ["image", "document", "search_result", "server_tool_use", "container_upload"]
)
async def test_block_that_is_no_text_is_refused_by_its_type(server: Running, kind: str) -> None:
    for role in ("user", "assistant"):
        turn = {"role": role, "content": [{"type": kind, "source": {"type": "text"}}]}
        answer = await ask(server, messages=[*HI, turn])
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages[1].content[0]")
        assert f"blocks of type '{kind}' are not supported" in error["message"]


async def test_answer_continues_the_assistants_words() -> None:
    async with running(chat_template=ROLES) as server:
        turns = [*HI, {"role": "assistant", "content": "Once upon"}]
        found = await message(server, messages=turns)
        start = len("user: hi\nassistant: Once upon")
    assert found["usage"]["input_tokens"] == start
    assert found["content"] == [{"type": "text", "text": story(start, 20)}]


async def test_an_end_token_ends_the_turn() -> None:
    async with running(FakeEngine(story=[*b"hello", EOS])) as server:
        found = await message(server, max_tokens=100)
    assert found["stop_reason"] == "end_turn"


KEY = "the-key"


async def test_either_header_has_the_key() -> None:
    async with running(api_keys=(KEY,)) as server:
        for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
            answer = await server.http.post(
                "/v1/messages", json={"max_tokens": 1, "messages": HI}, headers=headers
            )
            assert answer.status_code == 200


async def test_errors_before_the_route_have_anthropics_shape_too() -> None:
    async with running(api_keys=(KEY,), max_body_bytes=10_000) as server:
        key, version = {"x-api-key": KEY}, {"anthropic-version": "2023-06-01"}
        long = {"max_tokens": 1, "messages": [{"role": "user", "content": "a" * 20_000}]}
        answers = [
            (await server.http.post("/v1/messages", json={}), 401, "authentication_error"),
            (
                await server.http.post("/v1/messages", json=long, headers=key),
                413,
                "request_too_large",
            ),
            (await server.http.get("/v1/messages/batches", headers=key), 404, "not_found_error"),
            (await server.http.get("/v1/messages", headers=key), 405, "invalid_request_error"),
            (await server.http.get("/v1/files", headers=key | version), 404, "not_found_error"),
        ]
        for answer, status, kind in answers:
            found = answer.json()
            assert (answer.status_code, found["type"]) == (status, "error"), answer.text
            assert found["error"]["type"] == kind
            assert "request-id" in answer.headers
        other = await server.http.get("/v1/files", headers=key)
        assert other.json()["error"]["type"] == "invalid_request_error"
        assert "request-id" not in other.headers


async def test_models_have_anthropics_shape_for_its_clients(server: Running) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await server.http.get("/v1/models", headers=headers)).json()
    (model,) = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "fake", "fake")
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("fake", "fake", False)
    assert (await server.http.get("/v1/models/fake", headers=headers)).json() == model
    plain = (await server.http.get("/v1/models")).json()
    assert (plain["object"], plain["data"][0]["object"]) == ("list", "model")


@pytest.mark.parametrize("stream", [False, True])
async def test_message_under_a_key_is_generated_once(server: Running, stream: bool) -> None:
    body, headers = {"max_tokens": 16, "messages": HI}, {"Idempotency-Key": "k"}
    first, again = [
        await server.http.post(
            "/v1/messages", json=body | {"stream": stream and number}, headers=headers
        )
        for number in (False, True)
    ]
    told = collected(events_of(again)) if stream else again.json()
    assert first.json()["content"] == told["content"]
    assert first.json()["usage"] == told["usage"]
    stats = await server.stats()
    assert (stats.completion_tokens_total, stats.num_sessions) == (16, 1)
