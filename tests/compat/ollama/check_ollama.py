"""The package `ollama`: models, chats, prompts, schemas, tools, vectors, many turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import httpx
import pytest
from ollama import AsyncClient, ResponseError
from pydantic import BaseModel, ConfigDict, Field
from served import FEW, KEY, MODEL, QUESTION, SERVER, client, knows_tools

NUM_TURNS = 20
#: As long as the instructions of a small assistant.
SYSTEM = "You tell stories of an old mill by the river, and you tell them slowly. " * 60


class Pet(BaseModel):
    """What the model must write, however little it knows of pets."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)


def weather(place: str) -> str:
    """The weather at a place.

    Args:
        place: where

    Returns:
        what it is like
    """
    return f"warm at {place}"


def test_models_are_listed_shown_and_pulled() -> None:
    api = client()
    (model,) = api.list().models
    assert model.model == f"{MODEL}:latest"
    assert model.size and model.details and model.details.parameter_size
    (loaded,) = api.ps().models
    assert loaded.model == model.model and loaded.expires_at is not None
    shown = api.show(MODEL)
    assert shown.capabilities and "completion" in shown.capabilities
    assert shown.modelinfo and shown.modelinfo["general.parameter_count"] > 0
    assert api.pull(MODEL).status == "success"
    with pytest.raises(ResponseError, match="operator"):
        api.pull("llama3")


def test_chat_whole_and_streamed_are_one_text() -> None:
    api = client()
    whole = api.chat(MODEL, QUESTION, options=FEW, keep_alive="5m")
    assert whole.message.content
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 24)
    assert whole.total_duration and whole.eval_duration and whole.prompt_eval_count
    *parts, last = api.chat(MODEL, QUESTION, options=FEW, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert len(parts) > 5 and last.done and last.eval_count == 24


def test_prompt_whole_and_streamed_are_one_text() -> None:
    api = client()
    whole = api.generate(MODEL, "Once upon a time", raw=True, options=FEW)
    parts = api.generate(MODEL, "Once upon a time", raw=True, options=FEW, stream=True)
    assert "".join(part.response or "" for part in parts) == whole.response != ""
    assert api.generate(MODEL).done_reason == "load"


def test_schema_is_followed() -> None:
    options = {"num_predict": 60, "seed": 1}
    said = client().chat(MODEL, QUESTION, format=Pet.model_json_schema(), options=options)
    Pet.model_validate_json(said.message.content or "")
    anything = client().chat(MODEL, QUESTION, format="json", options=options)
    assert (anything.message.content or "").lstrip().startswith("{")


def test_tools_are_shown_and_their_results_are_read() -> None:
    """Whether this model calls one is its own affair; a history with a call is read."""
    api = client()
    if not knows_tools():
        with pytest.raises(ResponseError, match="chat template") as refused:
            api.chat(MODEL, QUESTION, tools=[weather], options=FEW)
        assert refused.value.status_code == 400
        return
    said = api.chat(MODEL, QUESTION, tools=[weather], options=FEW)
    for call in said.message.tool_calls or ():
        assert weather(**call.function.arguments)
    call = {"function": {"name": "weather", "arguments": {"place": "Rome"}}}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": weather("Rome"), "tool_name": "weather"},
    ]
    assert api.chat(MODEL, messages, tools=[weather], options=FEW).done


def test_vectors_have_the_length_1() -> None:
    found = client().embed(MODEL, ["a mill", "a river"]).embeddings
    assert [round(sum(x * x for x in vector), 3) for vector in found] == [1, 1]
    assert list(client().embeddings(MODEL, "a mill").embedding) == list(found[0])


def test_refusals_are_errors_with_a_status() -> None:
    for model, options, status in (("llama3", FEW, 404), (MODEL, {"mirostat": 2}, 400)):
        with pytest.raises(ResponseError) as caught:
            client().chat(model, QUESTION, options=options)
        assert caught.value.status_code == status
    with pytest.raises(ResponseError) as refused:
        client(headers={}).list()
    assert refused.value.status_code == 401
    with pytest.raises(ResponseError, match="think"):
        client().chat(MODEL, QUESTION, think=True)


def test_nearly_all_of_twenty_turns_is_cached() -> None:
    """What the prefix cache had is in a field of ours, which the package does not show."""
    seen: list[dict[str, Any]] = []

    def read(response: httpx.Response) -> None:
        seen.append(json.loads(response.read()))

    api = client(event_hooks={"response": [read]})
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"Go on, part {turn}."})
        said = api.chat(MODEL, messages, options=FEW | {"num_predict": 8})
        messages.append(said.message)
    shares = [each["prompt_cached_count"] / each["prompt_eval_count"] for each in seen]
    assert len(shares) == NUM_TURNS
    assert min(shares[1:]) >= 0.95, shares


def test_the_asynchronous_client_does_the_same() -> None:
    async def text() -> str:
        api = AsyncClient(host=SERVER, headers=KEY)
        parts = await api.chat(MODEL, QUESTION, options=FEW, stream=True)
        return "".join([part.message.content or "" async for part in parts])

    assert asyncio.run(text()) == client().chat(MODEL, QUESTION, options=FEW).message.content
