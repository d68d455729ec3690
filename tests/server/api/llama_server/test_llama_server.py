"""llama.cpp's routes: its words on the wire, and the engine's request behind them."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from benchmarks import sse
from model.tokenizer import Tokenizer
from server.constraints.compiler import FormatCompiler
from server.engine.types import Dry, SamplingParams
from tests.fakes import MODEL, ByteTokenizer, FakeEngine
from tests.server.harness import Recorder, Running, running

pytestmark = pytest.mark.process

FEW: dict[str, Any] = {"prompt": "hi", "n_predict": 6, "seed": 5}


async def completion(server: Running, **body: Any) -> dict[str, Any]:
    answer = await server.http.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refusal(server: Running, path: str, **body: Any) -> tuple[int, str]:
    answer = await server.http.post(path, json=body)
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    return answer.status_code, error["message"]


async def test_completion_is_that_of_openai_s_route(server: Running) -> None:
    whole = await completion(server, **FEW)
    body = {"prompt": "hi", "max_tokens": 6, "seed": 5}
    plain = (await server.http.post("/v1/completions", json=body)).json()
    assert whole["content"] == plain["choices"][0]["text"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 6)
    assert whole["tokens_evaluated"] == plain["usage"]["prompt_tokens"]
    timings = whole["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == whole["tokens_evaluated"]
    assert timings["predicted_n"] == 6
    assert timings["predicted_per_second"] > 0 and timings["prompt_ms"] > 0


async def test_events_are_the_whole_answer(server: Running) -> None:
    whole = await completion(server, **FEW, return_tokens=True)
    answer = await server.http.post("/completion", json=FEW | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, last = [event.value for event in sse.events_of(answer.content)]
    assert all(not piece["stop"] for piece in pieces)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "limit")
    assert last["timings"].keys() == whole["timings"].keys()
    assert len(whole["tokens"]) == 6
    assert bytes(whole["tokens"]).decode(errors="replace") == whole["content"]


@pytest.mark.parametrize("story", [b"one\ntwo", b"one two"])
async def test_new_line_is_told_of_a_stream_as_of_a_whole_answer(story: bytes) -> None:
    async with running(FakeEngine(story=[*story])) as server:
        whole = await completion(server, **FEW)
        answer = await server.http.post("/completion", json=FEW | {"stream": True})
    *_, last = [event.value for event in sse.events_of(answer.content)]
    assert whole["has_new_line"] is last["has_new_line"] is ("\n" in whole["content"])
    assert whole["has_new_line"] is (b"\n" in story)


async def test_prompt_may_be_token_ids_and_may_only_be_read(server: Running) -> None:
    as_ids = await completion(server, **FEW | {"prompt": [*b"hi"]})
    assert as_ids["content"] == (await completion(server, **FEW))["content"]
    read = await completion(server, **FEW | {"n_predict": 0})
    assert (read["content"], read["tokens_predicted"], read["tokens_evaluated"]) == ("", 0, 2)


async def test_stop_string_is_named(server: Running) -> None:
    text = (await completion(server, **FEW | {"n_predict": 40}))["content"]
    word = text[10:12]
    found = await completion(server, **FEW | {"n_predict": 40, "stop": [word, "never"]})
    assert (found["stop_type"], found["stopping_word"]) == ("word", word)
    assert text.startswith(found["content"]) and word not in found["content"]


async def test_parameters_reach_the_engine() -> None:
    """As SillyTavern sends them: all of them, most of them off, many under two names."""
    engine = Recorder()
    body = {
        "prompt": "hi",
        "n_predict": 7,
        "max_tokens": 7,
        "max_new_tokens": 7,
        "seed": 3,
        "temperature": 0.5,
        "top_k": 40.0,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "top_n_sigma": 2,
        "nsigma": 2,
        "dry_multiplier": 0.5,
        "dry_sequence_breakers": '["\\n"]',
        "xtc_probability": 0.25,
        "logit_bias": [[5, -1.5], [6, False]],
        "stop": ["END"],
        "ignore_eos": True,
        "mirostat": 0,
        "mirostat_tau": 5,
        "mirostat_eta": 0.1,
        "tfs_z": 1,
        "top_a": 0,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "smoothing_factor": 0,
        "n_probs": 0,
        "samplers": ["top_k", "top_p", "min_p"],
        "cache_prompt": True,
        "grammar": "",
    }
    async with running(engine) as server:
        answer = await server.http.post("/completion", json=body)
        assert answer.status_code == 200, answer.text
    ignored = "cache_prompt, dynatemp_exponent, mirostat_eta, mirostat_tau, samplers"
    assert answer.headers["x-everstream-ignored"] == ignored
    wanted = SamplingParams(
        *(0.5, 40, 0.8, 0.1, 1.2, 0.5, 0.25, 3, 7, ("END",)),
        ignore_eos=True,
        typical_p=0.9,
        top_n_sigma=2.0,
        xtc_probability=0.25,
        logit_bias=((5, -1.5), (6, -100.0)),
        dry=Dry(0.5, breakers=(ord("\n"),)),
    )
    assert engine.sampling == [wanted]


async def test_answer_follows_a_schema() -> None:
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine = FakeEngine(matchers=constraints.matcher)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    body = FEW | {"n_predict": 100, "json_schema": {**schema, "additionalProperties": False}}
    async with running(engine, constraints=constraints) as server:
        assert json.loads((await completion(server, **body))["content"]) == {"a": 1}


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("/completion", "prompt", {"prompt": ""}),
    ("/completion", "prompt", {"prompt": None}),
    ("/completion", "prompt", {"prompt": ["a", "b"]}),
    ("/completion", "grammar", {"grammar": "root ::= [a-z]"}),
    ("/completion", "mirostat", {"mirostat": 2}),
    ("/completion", "n_probs", {"n_probs": 3}),
    ("/completion", "n_predict", {"n_predict": 2**40}),
    ("/completion", "max_tokens", {"max_tokens": "many"}),
    ("/completion", "max_tokens", {"n_predict": 2, "max_tokens": 3}),
    ("/completion", "repeat_last_n", {"repeat_last_n": 64, "repeat_penalty": 1.1}),
    ("/completion", "logit_bias", {"logit_bias": [["word", 1]]}),
    ("/completion", "logit_bias", {"logit_bias": [[5, 1000]]}),
    ("/completion", "lora", {"lora": [{"id": 0, "scale": 1}]}),
    ("/completion", "nonsense", {"nonsense": 1}),
    ("/infill", "input_suffix", {"input_prefix": "a", "input_suffix": "b"}),
    ("/infill", "input_extra", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}),
    ("/apply-template", "messages", {"messages": []}),
    ("/tokenize", "messages", {"content": "a", "messages": [{"role": "user", "content": "a"}]}),
]


async def test_refusal_names_the_field_and_has_the_status_as_its_code(server: Running) -> None:
    for path, field, body in REFUSED:
        rest = {"prompt": "hi"} if path == "/completion" else {}
        answer = await server.http.post(path, json=rest | body)
        error = answer.json()["error"]
        assert (answer.status_code, str(error["param"]).startswith(field)) == (400, True), body
        if path != "/tokenize":
            assert error["code"] == 400


async def test_window_of_penalties_without_a_penalty_says_nothing(server: Running) -> None:
    for number in (0, 64, 256, 1024, -1):
        assert (await completion(server, **FEW, repeat_last_n=number))["tokens_predicted"] == 6


async def test_text_is_filled_in_where_the_vocabulary_has_the_tokens() -> None:
    class Filling(ByteTokenizer):
        special_ids = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}  # noqa: RUF012

    async with running(tokenizer=Filling()) as server:
        body = {"input_prefix": "ab", "input_suffix": "c", "prompt": "x", "n_predict": 4, "seed": 1}
        filled = (await server.http.post("/infill", json=body)).json()
        ids = [1, *b"ab", 2, *b"c", 3, *b"x"]
        assert filled["tokens_evaluated"] == len(ids)
        assert filled["content"] == (await completion(server, **body_of_ids(ids)))["content"]


def body_of_ids(ids: list[int]) -> dict[str, Any]:
    return {"prompt": ids, "n_predict": 4, "seed": 1}


async def test_properties_slots_and_meta_agree(server: Running) -> None:
    props = (await server.http.get("/props")).json()
    n_ctx = props["default_generation_settings"]["n_ctx"]
    assert n_ctx > 0 and props["model_path"] == MODEL.name
    assert isinstance(props["chat_template"], str)
    slots = (await server.http.get("/slots")).json()
    assert len(slots) == props["total_slots"]
    assert {slot["n_ctx"] for slot in slots} == {n_ctx}
    assert not any(slot["is_processing"] for slot in slots)
    (model,) = (await server.http.get("/v1/models")).json()["data"]
    meta = model["meta"]
    assert (meta["n_ctx"], meta["n_params"]) == (n_ctx, MODEL.parameters)
    assert (await server.http.get("/health")).json() == {"status": "ok"}


async def test_text_becomes_tokens_and_text_again(server: Running) -> None:
    async def post(path: str, **body: Any) -> Any:
        return (await server.http.post(path, json=body)).json()

    assert await post("/tokenize", content="hé") == {"tokens": [*"hé".encode()]}
    found = await post("/tokenize", content="hé", add_special=True, with_pieces=True)
    pieces = ["<|endoftext|>", "h", [0xC3], [0xA9]]
    assert [token["piece"] for token in found["tokens"]] == pieces
    plain = await post("/tokenize", content="<|endoftext|>", parse_special=False)
    assert plain == {"tokens": [*b"<|endoftext|>"]}
    assert (await post("/detokenize", tokens=[*"hé".encode()]))["content"] == "hé"
    messages = [{"role": "user", "content": "hi"}]
    rendered = (await post("/apply-template", messages=messages))["prompt"]
    shown = await post("/tokenize", messages=messages)
    assert (await post("/detokenize", tokens=shown["tokens"]))["content"] == rendered


async def test_errors_before_the_routes_have_the_same_shape() -> None:
    async with running(api_keys=("key",)) as server:
        assert (await refusal(server, "/completion", **FEW))[0] == 401
        server.http.headers["authorization"] = "Bearer key"
        assert (await refusal(server, "/props"))[0] == 405
        assert (await refusal(server, "/completion", **FEW, model="other"))[0] == 404


async def test_key_gives_the_same_answer_again(server: Running) -> None:
    headers, body = {"Idempotency-Key": "once"}, {"prompt": "hi", "n_predict": 20}
    first = await server.http.post("/completion", json=body, headers=headers)
    again = await server.http.post("/completion", json=body, headers=headers)
    assert first.json()["content"] == again.json()["content"] != ""
