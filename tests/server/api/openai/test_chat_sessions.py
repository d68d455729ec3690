"""A kept session in `POST /v1/chat/completions`: later requests bring the new turns alone."""

from __future__ import annotations

from typing import Any

import pytest

from model.chat import ChatTemplate
from tests.fakes import FakeEngine, told_after
from tests.server.api.openai.test_chat import ask
from tests.server.api.openai.thinking import thinking_server
from tests.server.api.talk import create, info, left, sse_of, story
from tests.server.harness import Running, running

pytestmark = pytest.mark.process

MORE = [{"role": "user", "content": "more"}]
TURNS = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


async def said(server: Running, **body: Any) -> dict[str, Any]:
    answer = await ask(server, **{"max_tokens": 6, "seed": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_session_reads_the_new_turns_alone() -> None:
    async with running(chat_template=TURNS) as server:
        first = await said(server, keep=True)
        whole = "<user>hi</>\n<assistant>"
        assert first["usage"]["prompt_tokens"] == len(whole)
        assert first["position"] == len(whole) + 6
        new = "</>\n<user>more</>\n<assistant>"
        second = await said(server, session=first["session"], messages=MORE)
        assert second["session"] == first["session"]
        assert second["usage"]["prompt_tokens"] == len(new)
        assert second["position"] == first["position"] + len(new) + 6
        text = second["choices"][0]["message"]["content"]
        assert text == story(first["position"] + len(new), 6)
        assert (await info(server, first["session"]))["position"] == second["position"]


async def test_end_of_a_turn_that_the_model_has_written_is_not_repeated() -> None:
    """Up to a stop string: the session has it, the answer has not."""
    prompt = "<user>hi</>\n<assistant>"
    engine = FakeEngine(story=told_after(len(prompt), "Hello!</>\n"))
    async with running(engine, chat_template=TURNS) as server:
        first = await said(server, keep=True, stop="</>", max_tokens=50)
        assert first["choices"][0]["message"]["content"] == "Hello!"
        second = await said(server, session=first["session"], messages=MORE)
    assert second["usage"]["prompt_tokens"] == len("\n<user>more</>\n<assistant>")


async def test_session_of_a_model_that_thinks_keeps_its_thinking() -> None:
    async with thinking_server(reasoning="on") as server:
        first = await said(server, keep=True, max_tokens=200)
        message = first["choices"][0]["message"]
        assert message["reasoning_content"] and message["content"]
        second = await said(server, session=first["session"], messages=MORE, max_tokens=1)
    # What ended the answer has been read: the template's own end of a turn is not repeated.
    prompt = "User: more\n\nAssistant: <think"
    assert second["usage"]["prompt_tokens"] <= len("\n\n" + prompt)
    assert second["usage"]["prompt_tokens"] >= len(" more\n\nAssistant: <think")


async def test_session_without_an_answer_reads_the_whole_rendering() -> None:
    async with running(chat_template=TURNS) as server:
        session = await create(server)
        found = await said(server, session=session)
    assert found["usage"]["prompt_tokens"] == len("<user>hi</>\n<assistant>")


async def test_turn_follows_appended_text_as_it_is() -> None:
    async with running(chat_template=TURNS) as server:
        first = await said(server, keep=True)
        session = first["session"]
        await server.http.post(f"/v1/sessions/{session}/append", json={"text": "</>"})
        second = await said(server, session=session, messages=MORE)
    assert second["usage"]["prompt_tokens"] == len("</>\n<user>more</>\n<assistant>")


async def test_stream_of_a_session_can_be_resumed(server: Running) -> None:
    answer = await ask(server, max_tokens=6, seed=0, keep=True, stream=True)
    events = sse_of(answer)
    first, *tokens, end = [value for _, value in events]
    session = first["session"]
    assert (first["position"], end["session"]) == (0, session)
    ids = [id for id, _ in events if id]
    assert [int(id.rpartition(":")[2]) for id in ids] == list(range(1, 8))
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in tokens]
    missed = await server.http.get(
        f"/v1/sessions/{session}/events", headers={"Last-Event-ID": ids[1]}
    )
    shown = [frame["text"] for _, frame in sse_of(missed) if frame["type"] == "token"]
    assert "".join(shown) == "".join(texts[2:])


async def test_chat_under_a_key_is_answered_once(server: Running) -> None:
    body = {"keep": True, "idempotency_key": "k", "max_tokens": 6, "seed": 0}
    first, again = [await said(server, **body) for _ in range(2)]
    for name in ("choices", "usage", "session", "position"):
        assert first[name] == again[name]
    streamed = sse_of(await ask(server, stream=True, **body))
    content = "".join(c["choices"][0]["delta"].get("content") or "" for _, c in streamed)
    assert content == first["choices"][0]["message"]["content"]
    assert (await server.stats()).completion_tokens_total == 6


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"session": "sess_0"}, 404, "session"),
        ({"session": 5}, 400, "session"),
        ({"keep": True, "n": 2}, 400, "n"),
        ({"keep": False, "idempotency_key": "k"}, 400, "idempotency_key"),
        ({"keep": True, "idempotency_key": "k", "logprobs": True}, 400, "idempotency_key"),
        ({"keep": 1}, 400, "keep"),
    ],
)
async def test_what_cannot_be_is_refused(
    server: Running, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await ask(server, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_busy_session_is_a_conflict(server: Running) -> None:
    answer = await ask(server, session=await left(server), messages=MORE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
