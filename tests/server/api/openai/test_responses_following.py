"""`previous_response_id`: the session continues in a copy, and what was said is not read again."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import FakeEngine
from tests.server.api.openai.responding import PROMPT, ask, asked, error_of, events_of, get, text_of
from tests.server.api.talk import at_rest, info, post, story
from tests.server.harness import Running, running

pytestmark = pytest.mark.process

#: What a chat template puts before the next answer.
NEXT = "\n\nmore\n\n"
#: Tokens of the first response's text.
LENGTH = len(PROMPT) + 6


async def test_only_what_is_new_is_read(server: Running) -> None:
    first = await asked(server)
    before = (await server.stats()).prompt_tokens_total
    second = await asked(server, input="more", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert (await server.stats()).prompt_tokens_total - before == len(NEXT)
    usage = second["usage"]
    assert usage["input_tokens"] == LENGTH + len(NEXT)
    assert usage["input_tokens_details"]["cached_tokens"] == LENGTH
    assert text_of(second) == story(LENGTH + len(NEXT), 6)


async def test_copy_reads_what_the_whole_conversation_would(server: Running) -> None:
    first = await asked(server, seed=2)  # it writes no spaces at its ends: the template cuts them
    followed = await asked(server, input="more", previous_response_id=first["id"])
    items = [
        {"role": "user", "content": "hi"},
        *first["output"],
        {"role": "user", "content": "more"},
    ]
    whole = await asked(server, input=items)
    assert text_of(whole) == text_of(followed)
    assert whole["usage"]["total_tokens"] == followed["usage"]["total_tokens"]


async def test_several_responses_can_follow_one(server: Running) -> None:
    first = await asked(server)
    body = {"previous_response_id": first["id"]}
    answers = await asyncio.gather(
        *(asked(server, input="more", seed=seed, **body) for seed in range(5))
    )
    for seed, answer in enumerate(answers):
        assert text_of(answer) == story(LENGTH + len(NEXT), 6, seed)
    assert len({answer["session"] for answer in (first, *answers)}) == 6
    assert (await get(server, first["id"])).json() == first


async def test_chain_of_responses_continues_after_its_middle_is_deleted(server: Running) -> None:
    first = await asked(server)
    second = await asked(server, input="more", previous_response_id=first["id"])
    await server.http.delete(f"/v1/responses/{first['id']}")
    third = await asked(server, input="more", previous_response_id=second["id"])
    assert third["usage"]["input_tokens_details"]["cached_tokens"] == LENGTH + len(NEXT) + 6
    answer = await ask(server, input="more", previous_response_id=first["id"])
    code = (400, "previous_response_not_found", "previous_response_id")
    assert await error_of(answer) == code


async def test_response_is_followed_where_it_ended_after_an_append(
    server: Running,
) -> None:
    first = await asked(server)
    await post(server, first["session"], "append", text="append")
    second = await asked(server, input="more", previous_response_id=first["id"])
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == LENGTH
    assert text_of(second) == story(LENGTH + len(NEXT), 6)
    assert (await info(server, first["session"]))["position"] == LENGTH + len("append")
    assert (await server.stats()).num_sessions == 2


async def test_instructions_are_not_carried_over(server: Running) -> None:
    first = await asked(server, instructions="be kind")
    without = await asked(server, input="more", previous_response_id=first["id"])
    text = f"hi\n\n{text_of(first).strip()}{NEXT}"
    assert without["instructions"] is None
    assert without["usage"]["input_tokens"] == len(text)
    assert without["usage"]["input_tokens_details"]["cached_tokens"] == 0
    body = {"input": "more", "previous_response_id": first["id"]}
    other = await asked(server, instructions="be brief", **body)
    assert other["usage"]["input_tokens"] == len(f"be brief\n\n{text}")


async def test_same_instructions_are_not_read_again(server: Running) -> None:
    first = await asked(server, instructions="be kind")
    body = {"input": "more", "previous_response_id": first["id"]}
    second = await asked(server, instructions="be kind", **body)
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == first["usage"]["total_tokens"]


async def test_conversation_that_is_not_all_there_cannot_be_read_again(server: Running) -> None:
    first = await asked(server)
    second = await asked(server, input="more", previous_response_id=first["id"])
    await server.http.delete(f"/v1/responses/{first['id']}")
    body = {"input": "more", "previous_response_id": second["id"], "instructions": "be brief"}
    answer = await ask(server, **body)
    assert await error_of(answer) == (400, "invalid_value", "previous_response_id")
    assert first["id"] in answer.json()["error"]["message"]


async def test_response_that_has_not_ended_cannot_be_followed(server: Running) -> None:
    first = await asked(server, background=True, max_output_tokens=10**6)
    answer = await ask(server, previous_response_id=first["id"])
    assert await error_of(answer) == (400, "invalid_value", "previous_response_id")
    await server.http.post(f"/v1/responses/{first['id']}/cancel")
    assert (await ask(server, previous_response_id=first["id"])).status_code == 200


async def test_follower_that_is_not_stored_leaks_nothing(server: Running) -> None:
    first = await asked(server)
    body = {"input": "more", "previous_response_id": first["id"], "store": False}
    second = await asked(server, **body)
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == LENGTH
    events = events_of(await ask(server, stream=True, **body))
    assert text_of(events[-1]["response"]) == text_of(second)
    await at_rest(server)
    assert (await server.stats()).num_sessions == 1


async def test_follower_that_cannot_begin_leaves_no_copy() -> None:
    async with running(FakeEngine(max_waiting=1)) as server:
        first = await asked(server)
        running_now = await asked(server, background=True, max_output_tokens=10**6)
        answer = await ask(server, input="more", previous_response_id=first["id"])
        assert await error_of(answer) == (429, "queue_full", None)
        assert (await server.stats()).num_sessions == 2
        await server.http.delete(f"/v1/responses/{running_now['id']}")
