"""Ollama's routes: its words on the wire, and the engine's request behind them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer
from server.constraints.compiler import FormatCompiler
from server.engine.types import Dry, SamplingParams
from tests.fakes import MODEL, ByteTokenizer, FakeEngine
from tests.server.harness import Recorder, Running, running

pytestmark = pytest.mark.process

HI: dict[str, Any] = {"model": MODEL.name, "messages": [{"role": "user", "content": "hi"}]}
FEW: dict[str, Any] = {"options": {"num_predict": 4, "seed": 5}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    """With a compiler of formats."""
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    async with running(FakeEngine(matchers=constraints.matcher), constraints=constraints) as begun:
        yield begun


async def asked(server: Running, path: str, **body: Any) -> dict[str, Any]:
    """The whole answer."""
    answer = await server.http.post(path, json=body | {"stream": False})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def lines(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    """Those of a stream, which is what an answer is unless it says otherwise."""
    answer = await server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def refusal(server: Running, path: str, **body: Any) -> tuple[int, str]:
    answer = await server.http.post(path, json=body)
    error = answer.json()
    assert isinstance(error["error"], str)
    return answer.status_code, error["error"]


async def test_lines_of_a_chat_are_the_whole_answer(server: Running) -> None:
    whole = await asked(server, "/api/chat", **HI, **FEW)
    *texts, last = await lines(server, "/api/chat", **HI, **FEW)
    assert all(not line["done"] for line in texts)
    assert "".join(line["message"]["content"] for line in texts) == whole["message"]["content"]
    assert whole["message"].keys() == {"role", "content"}
    for end in (whole, last):
        assert (end["done"], end["done_reason"], end["eval_count"]) == (True, "length", 4)
        assert end["model"] == MODEL.name
        assert end["prompt_eval_count"] > 0
        durations = ("total_duration", "prompt_eval_duration", "eval_duration")
        assert all(end[name] > 0 for name in durations)
        assert end["load_duration"] == 0


async def test_a_prompt_is_in_the_template_or_raw(server: Running) -> None:
    said = {"model": MODEL.name, "prompt": "hi"}
    in_template = await asked(server, "/api/generate", **said, **FEW)
    as_chat = await asked(server, "/api/chat", **HI, **FEW)
    assert in_template["response"] == as_chat["message"]["content"]
    assert in_template["prompt_eval_count"] == as_chat["prompt_eval_count"]
    raw = await asked(server, "/api/generate", **said, **FEW, raw=True)
    completion = {"prompt": "hi", "max_tokens": 4, "seed": 5}
    plain = (await server.http.post("/v1/completions", json=completion)).json()
    assert raw["response"] == plain["choices"][0]["text"]
    with_system = await asked(server, "/api/generate", **said, **FEW, system="be kind")
    assert with_system["prompt_eval_count"] > in_template["prompt_eval_count"]
    texts = await lines(server, "/api/generate", **said, **FEW, raw=True)
    assert "".join(line["response"] for line in texts) == raw["response"]


async def test_nothing_to_say_loads_the_model(server: Running) -> None:
    (line,) = await lines(server, "/api/chat", model=MODEL.name, messages=[], keep_alive="5m")
    assert (line["done"], line["done_reason"]) == (True, "load")
    (line,) = await lines(server, "/api/generate", model=MODEL.name)
    assert (line["response"], line["done_reason"]) == ("", "load")
    assert (await server.stats()).prompt_tokens_total == 0


async def test_options_reach_the_engine() -> None:
    engine = Recorder()
    options = {
        "num_predict": 7,
        "seed": 3,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "stop": ["END"],
        "top_n_sigma": 2,
        "dry_multiplier": 0.5,
        "num_ctx": 4096,
        "num_thread": 4,
        "num_gpu": 1,
    }
    body = {"model": MODEL.name, "prompt": "hi", "raw": True, "options": options}
    async with running(engine) as server:
        answer = await server.http.post("/api/generate", json=body)
        assert answer.headers["x-everstream-ignored"] == "num_ctx, num_gpu, num_thread"
        await server.http.post("/api/generate", json={"model": MODEL.name, "prompt": "hi"})
    wanted = SamplingParams(
        *(0.5, 40, 0.8, 0.1, 1.2, 0.5, 0.25, 3, 7, ("END",)),
        typical_p=0.9,
        top_n_sigma=2.0,
        dry=Dry(0.5, breakers=tuple(map(ord, '\n:"*'))),
    )
    assert engine.sampling[0] == wanted


@pytest.mark.parametrize("number", [-1, -2, 0])
async def test_no_limit_is_the_server_s(number: int) -> None:
    async with running(max_tokens_limit=6) as server:
        said = await asked(server, "/api/chat", **HI, options={"num_predict": number})
    assert said["eval_count"] == 6


async def test_format_is_json_or_a_schema(server: Running) -> None:
    long = {"options": {"num_predict": 100, "seed": 1}}
    for wanted in (SCHEMA, "json"):
        said = await asked(server, "/api/chat", **HI, **long, format=wanted)
        text = said["message"]["content"]
        if wanted == "json":
            assert text.lstrip().startswith("{")
        else:
            assert json.loads(text) == {"a": 1}
    raw = {"model": MODEL.name, "prompt": "hi", "raw": True}
    text = (await asked(server, "/api/generate", **raw, **long, format=SCHEMA))["response"]
    assert json.loads(text) == {"a": 1}
    plain = await asked(server, "/api/chat", **HI, **FEW, format="")
    assert plain["eval_count"] == 4


async def test_results_of_calls_find_theirs_without_ids() -> None:
    template = "{% for m in messages %}[{{ m.role }}{{ m.tool_call_id }}{% for c in m.tool_calls %}"
    template += "{{ c.id }}{{ c.function.name }}{% endfor %}]{% endfor %}"
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    other = {"function": {"name": "time", "arguments": {}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "content": "late", "tool_name": "time"},
        {"role": "tool", "content": "warm", "tool_name": "weather"},
    ]
    async with running(chat_template=ChatTemplate(template)) as server:
        said = await asked(server, "/api/chat", model=MODEL.name, messages=messages, **FEW)
        shown = "[user][assistantcall_0weathercall_1time][toolcall_1][toolcall_0]"
        assert said["prompt_eval_count"] == len(shown)
        thinking = {"role": "assistant", "content": "ho", "thinking": "hm"}
        again = [messages[0], thinking, messages[0]]
        said = await asked(server, "/api/chat", model=MODEL.name, messages=again, **FEW)
        assert said["prompt_eval_count"] == len("[user][assistant][user]")


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("/api/chat", "messages[0].images", {"messages": [{"role": "user", "images": ["aGk="]}]}),
    ("/api/chat", "messages[0].role", {"messages": [{"role": "narrator", "content": "x"}]}),
    ("/api/chat", "format", {**HI, "format": "yaml"}),
    ("/api/chat", "think", {**HI, "think": True}),
    ("/api/chat", "think", {**HI, "think": "much"}),
    ("/api/chat", "logprobs", {**HI, "logprobs": True}),
    (
        "/api/chat",
        "options.repeat_last_n",
        {**HI, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
    ),
    ("/api/chat", "options.mirostat", {**HI, "options": {"mirostat": 2}}),
    ("/api/chat", "options.temprature", {**HI, "options": {"temprature": 1}}),
    ("/api/chat", "options.num_predict", {**HI, "options": {"num_predict": 2**40}}),
    ("/api/chat", "options.repeat_penalty", {**HI, "options": {"repeat_penalty": 0}}),
    ("/api/chat", "nonsense", {**HI, "nonsense": 1}),
    ("/api/generate", "suffix", {"prompt": "a", "suffix": "b"}),
    ("/api/generate", "template", {"prompt": "a", "template": "{{ .Prompt }}"}),
    ("/api/generate", "context", {"prompt": "a", "context": [1]}),
    ("/api/generate", "images", {"prompt": "a", "images": ["aGk="]}),
    ("/api/embed", "input", {}),
    ("/api/embed", "input", {"input": []}),
    ("/api/embed", "dimensions", {"input": "a", "dimensions": 3}),
    ("/api/embeddings", "prompt", {}),
    ("/api/show", "name", {"name": 5}),
]


async def test_refusal_is_a_text_that_names_the_field(server: Running) -> None:
    for path, field, body in REFUSED:
        status, said = await refusal(server, path, **{"model": MODEL.name} | body)
        assert (status, said.startswith(f"{field}: ")) == (400, True), (field, said)


async def test_errors_before_the_routes_have_the_same_shape() -> None:
    async with running(api_keys=("key",)) as server:
        assert (await refusal(server, "/api/chat", **HI))[0] == 401
        server.http.headers["authorization"] = "Bearer key"
        assert (await refusal(server, "/api/chat", **HI | {"model": "other"}))[0] == 404
        assert (await refusal(server, "/api/nothing"))[0] == 404
        answer = await server.http.get("/api/chat")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert isinstance(answer.json()["error"], str)


async def test_models_are_listed_and_shown(server: Running) -> None:
    (listed,) = (await server.http.get("/api/tags")).json()["models"]
    assert listed["name"] == listed["model"] == f"{MODEL.name}:latest"
    assert listed["digest"] == MODEL.digest
    (loaded,) = (await server.http.get("/api/ps")).json()["models"]
    assert loaded == {**loaded, **listed}
    shown = await asked_of(server, "/api/show", model=listed["name"])
    about = shown["model_info"]
    assert about["general.parameter_count"] == MODEL.parameters
    assert any(name.endswith(".context_length") for name in about)
    assert "completion" in shown["capabilities"] and "thinking" not in shown["capabilities"]
    assert (await server.http.get("/api/version")).json()["version"].count(".") == 2
    said = await asked(server, "/api/chat", **HI | {"model": listed["name"]}, **FEW)
    assert said["model"] == listed["name"]


@pytest.mark.parametrize("teaches", [False, True])
async def test_tools_are_a_capability_where_a_chat_with_tools_is_accepted(teaches: bool) -> None:
    function = {"name": "wait", "parameters": {"type": "object", "properties": {}}}
    body = HI | FEW | {"tools": [{"type": "function", "function": function}]}
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine, template = FakeEngine(matchers=constraints.matcher), None if teaches else "hi"
    chat_template = ChatTemplate(template) if template else None
    async with running(engine, constraints=constraints, chat_template=chat_template) as server:
        shown = await asked_of(server, "/api/show", model=MODEL.name)
        assert ("tools" in shown["capabilities"]) == teaches
        answer = await server.http.post("/api/chat", json=body)
        assert answer.status_code == (200 if teaches else 400)


async def asked_of(server: Running, path: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = (await server.http.post(path, json=body)).json()
    return found


async def test_no_client_changes_which_models_there_are(server: Running) -> None:
    pulled = await asked_of(server, "/api/pull", model=f"{MODEL.name}:latest", stream=False)
    assert pulled == {"status": "success"}
    for path in ("/api/pull", "/api/create", "/api/copy", "/api/push"):
        status, said = await refusal(server, path, model="llama3")
        assert status == 400 and "operator" in said
    answer = await server.http.request("DELETE", "/api/delete", json={"model": MODEL.name})
    assert answer.status_code == 400 and "operator" in answer.json()["error"]


async def test_vectors_are_those_of_openai_s_route(server: Running) -> None:
    texts = ["hi", "ho"]
    ours = (await server.http.post("/v1/embeddings", json={"input": texts})).json()["data"]
    found = await asked_of(server, "/api/embed", model=MODEL.name, input=texts, truncate=True)
    assert found["embeddings"] == [each["embedding"] for each in ours]
    assert found["prompt_eval_count"] == 4
    one = await asked_of(server, "/api/embed", model=MODEL.name, input="hi")
    assert one["embeddings"] == found["embeddings"][:1]
    old = await asked_of(server, "/api/embeddings", model=MODEL.name, prompt="hi")
    assert old == {"embedding": found["embeddings"][0]}


async def test_key_gives_the_same_answer_again(server: Running) -> None:
    headers = {"Idempotency-Key": "turn 1"}
    body = HI | {"options": {"num_predict": 8}}
    first = await server.http.post("/api/chat", json=body, headers=headers)
    again = await server.http.post("/api/chat", json=body, headers=headers)
    texts = [
        "".join(json.loads(line)["message"]["content"] for line in answer.text.splitlines())
        for answer in (first, again)
    ]
    assert texts[0] == texts[1] != ""
