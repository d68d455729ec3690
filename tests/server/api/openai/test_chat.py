"""`POST /v1/chat/completions` over a fake engine, which reads and writes bytes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from model.chat import ChatTemplate
from tests.fakes import EOS
from tests.server.api.talk import story, usage_of, values_of
from tests.server.harness import Recorder, Running, running

pytestmark = pytest.mark.process

ROLES = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HI = [{"role": "user", "content": "hi"}]

#: The plain template writes a paragraph.
NUM_HI = len("hi\n\n")


async def ask(server: Running, **body: Any) -> httpx.Response:
    return await server.http.post("/v1/chat/completions", json={"messages": HI, **body})


async def test_json_answer_has_openai_shape(server: Running) -> None:
    response = await ask(server, model="fake", max_tokens=20, seed=0, user="me")
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "fake",
        "system_fingerprint": "fp_000000000000",
        "seed": 0,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": story(NUM_HI, 20),
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": usage_of(NUM_HI, 20),
    }


async def test_stream_begins_with_the_role_and_ends_with_the_reason(server: Running) -> None:
    first, *middle, last = values_of(await ask(server, max_tokens=20, seed=0, stream=True))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert len(middle) == 20
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == story(NUM_HI, 20)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in (first, *middle, last)}) == 1
    assert "usage" not in last


async def test_usage_comes_last_or_all_along(server: Running) -> None:
    options, body = {"include_usage": True}, {"max_tokens": 2, "seed": 0, "stream": True}
    *others, last = values_of(await ask(server, **body, stream_options=options))
    assert [chunk["usage"] for chunk in others] == [None] * 4
    assert last["choices"] == []
    total = usage_of(NUM_HI, 2)
    assert last["usage"] == total
    options["continuous_usage_stats"] = True
    *others, last = values_of(await ask(server, **body, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in others] == [1, 1, 2, 2]
    assert last["usage"] == total


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_told_apart(server: Running, stream: bool) -> None:
    response = await ask(server, max_tokens=8, seed=1, n=3, stream=stream)
    texts = ["", "", ""]
    if stream:
        for chunk in values_of(response):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        texts = [choice["message"]["content"] for choice in response.json()["choices"]]
        assert response.json()["usage"]["prompt_tokens"] == NUM_HI
    assert texts == [story(NUM_HI, 8, seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_name_the_tokens_of_the_content(server: Running, stream: bool) -> None:
    body = {"max_tokens": 3, "seed": 0, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await ask(server, **body)
    if stream:
        shown = [chunk["choices"][0]["logprobs"] for chunk in values_of(response)]
        assert shown[0] is None and shown[-1] is None
        entries = [entry for one in shown[1:-1] for entry in one["content"]]
    else:
        (choice,) = response.json()["choices"]
        assert choice["logprobs"]["refusal"] is None
        entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == story(NUM_HI, 3)
    assert [bytes(entry["bytes"]).decode() for entry in entries] == [*story(NUM_HI, 3)]
    assert all(entry["logprob"] < 0 for entry in entries)
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2, 2]
    assert set(entries[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}


async def test_turn_ends_with_the_templates_own_token_too() -> None:
    engine = Recorder()
    template = ChatTemplate("x", None, {"eos_token": "<|endoftext|>"})
    async with running(engine, chat_template=template) as server:
        await ask(server, max_tokens=1)
        await ask(server, max_tokens=1, ignore_eos=True)
    assert [params.stop_token_ids for params in engine.sampling if params] == [(EOS,), ()]


async def test_messages_are_read_by_the_template() -> None:
    messages = [{"role": "system", "content": "Be END"}, *HI]
    async with running(chat_template=ROLES) as server:
        answer = (await ask(server, messages=messages, max_tokens=1)).json()
        text = "system: Be END\nuser: hi\nassistant: "
        assert answer["usage"]["prompt_tokens"] == len(text)
        go_on = [*messages, {"role": "assistant", "content": "END"}]
        ended = await ask(server, messages=go_on, continue_final_message=True)
        assert ended.json()["choices"][0]["finish_reason"] == "stop"
        assert ended.json()["usage"]["completion_tokens"] == 1
        bare = (await ask(server, add_generation_prompt=False, max_tokens=1)).json()
        assert bare["usage"]["prompt_tokens"] == len("user: hi\n")


async def test_error_raised_by_the_template_is_a_400() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    async with running(chat_template=ChatTemplate(source)) as server:
        response = await ask(server)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "messages: the model's chat template says: roles must alternate",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "invalid_value",
    }


async def test_answer_of_an_assistant_can_be_sent_back(server: Running) -> None:
    message = (await ask(server, max_tokens=3)).json()["choices"][0]["message"]
    theirs = {**message, "audio": None, "function_call": None, "annotations": []}
    assert (await ask(server, messages=[*HI, theirs, *HI], max_tokens=1)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_is_a_plain_500(server: Running, stream: bool) -> None:
    response = await ask(server, messages=[{"role": "user", "content": "<fail>"}], stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"


async def test_null_and_defaults_are_accepted(server: Running) -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "tools")
    names += ("tool_choice", "parallel_tool_calls", "response_format", "logprobs", "max_tokens")
    names += ("top_logprobs", "user", "logit_bias", "audio", "modalities", "store", "metadata")
    names += ("functions", "function_call", "prediction", "web_search_options", "service_tier")
    names += ("chat_template_kwargs", "continue_final_message", "session", "reasoning_effort")
    assert (await ask(server, max_completion_tokens=1, **dict.fromkeys(names))).status_code == 200
    defaults = {"modalities": ["text"], "store": False, "service_tier": "auto", "keep": False}
    defaults |= {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    defaults |= {"verbosity": "medium", "reasoning_effort": "none", "top_k": -1}
    defaults |= {"reasoning": {"effort": "none", "summary": None}, "never_heard_of": None}
    defaults |= {"logprobs": False, "top_logprobs": 0, "function_call": "none", "functions": []}
    defaults |= {"stream_options": {"include_usage": False}, "parallel_tool_calls": True}
    defaults |= {"prompt_cache_key": "k", "safety_identifier": "s", "metadata": {}}
    defaults |= {"prompt_cache_retention": "in_memory", "top_logprobs": 0}
    answer = await ask(server, max_tokens=1, **defaults)
    assert answer.status_code == 200, answer.text


async def test_prompt_that_is_too_long_names_the_messages() -> None:
    async with running(max_prompt_tokens=10) as server:
        response = await ask(server, messages=[{"role": "user", "content": "x" * 20}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_fields_without_effect_are_named_in_a_header(server: Running) -> None:
    marked = {"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}, "id": "m"}
    answer = await ask(server, messages=[marked], max_tokens=1)
    assert answer.headers["x-everstream-ignored"] == "cache_control, id"
    assert "x-everstream-ignored" not in (await ask(server, max_tokens=1)).headers
