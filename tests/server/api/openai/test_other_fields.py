"""What other servers' clients call things is mapped, or without effect and listed in the head."""

from __future__ import annotations

from typing import Any, cast

import pytest

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer
from server.api.openai.bodies import HARMLESS, OTHER_NAMES
from server.constraints.compiler import FormatCompiler
from server.engine.types import SamplingParams
from tests.fakes import ByteTokenizer, FakeEngine
from tests.server.harness import Recorder, Running, running

pytestmark = pytest.mark.process
IGNORED = "x-everstream-ignored"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {**HI, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}
#: A value of each field that has another name, other than its default.
VALUES: dict[str, Any] = {
    "max_tokens": 3,
    "repetition_penalty": 1.5,
    "typical_p": 0.5,
    "top_n_sigma": 2.0,
    "seed": 7,
    "stop": ["\n\n"],
}


async def drawn_by(path: str, **body: Any) -> SamplingParams:
    """What reaches the engine."""
    engine = Recorder()
    async with running(engine) as server:
        answer = await server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
    (params,) = engine.sampling
    assert params is not None
    return params


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_field_of_another_name_is_ours(path: str) -> None:
    for theirs, ours in OTHER_NAMES.items():
        if ours == "repeat_last_n":  # which does not reach the engine
            continue
        value = VALUES[ours]
        rest = {name: item for name, item in ROUTES[path].items() if name != ours}
        found = await drawn_by(path, **rest | {theirs: value})
        wanted = tuple(value) if isinstance(value, list) else value
        assert getattr(found, ours) == wanted, theirs


async def test_a_response_has_the_other_names_too() -> None:
    found = await drawn_by("/v1/responses", input="hi", repeat_penalty=1.5, sampler_seed=7)
    assert (found.repetition_penalty, found.seed) == (1.5, 7)


async def test_names_may_come_together_with_one_value(server: Running) -> None:
    """SillyTavern sends all of them; what contradicts is named as the client has it."""
    same = {"max_tokens": 2, "max_new_tokens": 2, "n_predict": 2, "num_predict": None}
    answer = await server.http.post("/v1/completions", json={"prompt": "hi"} | same)
    assert answer.json()["usage"]["completion_tokens"] == 2
    answer = await server.http.post(
        "/v1/completions", json={"prompt": "hi"} | same | {"n_predict": 3}
    )
    error = answer.json()["error"]
    assert error["param"] == "n_predict"
    assert error["message"] == "n_predict: is another name for max_tokens, which has another value"
    answer = await server.http.post("/v1/completions", json={"prompt": "hi", "n_predict": "many"})
    assert answer.json()["error"]["message"] == "n_predict: must be a valid integer"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_minus_one_is_no_limit_and_a_seed_that_is_drawn(path: str) -> None:
    rest = {name: item for name, item in ROUTES[path].items() if name != "max_tokens"}
    engine = Recorder()
    async with running(engine, max_tokens_limit=5) as server:
        answer = await server.http.post(path, json=rest | {"max_tokens": -1, "seed": -1})
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert answer.json()["seed"] >= 0
    assert engine.sampling[0] is not None
    assert engine.sampling[0].max_tokens == 5


async def test_whole_numbers_may_be_written_with_a_point() -> None:
    found = await drawn_by("/v1/completions", prompt="hi", top_k=40.0, max_tokens=3.0, seed=-1.0)
    assert (found.top_k, found.max_tokens) == (40, 3)


async def test_many_stops_are_accepted() -> None:
    stops = [f"stop {number}" for number in range(64)]
    found = await drawn_by("/v1/completions", prompt="hi", max_tokens=2, stop=stops)
    assert found.stop == tuple(stops)


@pytest.mark.parametrize("path", ROUTES)
async def test_field_without_effect_is_listed_in_the_head(server: Running, path: str) -> None:
    fields = HARMLESS - {"store", "metadata"} if path == "/v1/responses" else HARMLESS
    rest = ROUTES[path] | {"seed": 5}
    plain = await server.http.post(path, json=rest)
    assert IGNORED not in plain.headers
    answer = await server.http.post(path, json=rest | dict.fromkeys(fields, "value"))
    assert answer.headers[IGNORED].split(", ") == sorted(fields)
    answer = await server.http.post(path, json=rest | dict.fromkeys(fields) | {"user": "ann"})
    assert answer.headers[IGNORED] == "user"


async def test_header_is_short_whatever_a_client_sends(server: Running) -> None:
    tools = [{"type": f"t{number:03}" + "x" * 60} for number in range(128)]
    answer = await server.http.post("/v1/responses", json={"input": "hi", "tools": tools})
    assert len(answer.headers[IGNORED].split(", ")) == 64


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": False, "thinking": {"type": "disabled"}}, False),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}}, False),
        ({"thinking": {}}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"enable_thinking": None, "thinking": None}, None),
    ],
)
async def test_switch_of_thinking_is_a_variable_of_the_template(
    given: dict[str, Any], is_on: bool | None
) -> None:
    """The template shows which value it got."""
    shown = "{{ enable_thinking if enable_thinking is defined else 'none' }}"
    async with running(chat_template=ChatTemplate(shown)) as server:
        body = HI | given | {"max_tokens": 1, "return_token_ids": True}
        answer = await server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        rendered = bytes(answer.json()["prompt_token_ids"]).decode()
    assert rendered == ("none" if is_on is None else str(is_on))


async def test_schema_next_to_json_object_is_followed() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    wanted = {"type": "json_object", "schema": {**schema, "additionalProperties": False}}
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine = FakeEngine(matchers=constraints.matcher)
    async with running(engine, constraints=constraints) as server:
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = ROUTES[path] | {"max_tokens": 100, "response_format": wanted}
            choice = (await server.http.post(path, json=body)).json()["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert "".join(text.split()) == '{"a":1}'


async def test_openai_s_paths_work_without_the_version(server: Running) -> None:
    for path, body in ROUTES.items():
        answer = await server.http.post(path.removeprefix("/v1"), json=body)
        assert answer.status_code == 200, path
    answer = await server.http.post("/embeddings", json={"input": "hi"})
    assert answer.json()["object"] == "list"
    listed = (await server.http.get("/models")).json()
    assert listed == (await server.http.get("/v1/models")).json()
    name = listed["data"][0]["id"]
    assert (await server.http.get(f"/models/{name}")).json()["id"] == name
    stored = (await server.http.post("/responses", json={"input": "hi"})).json()["id"]
    assert (await server.http.get(f"/responses/{stored}")).json()["id"] == stored
    assert (await server.http.get("/sessions")).status_code == 404
