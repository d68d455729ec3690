"""A model with attention layers is served under the bound that its operator states."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.model.commands import everstream, refused
from tests.server.served import Served, served
from tests.tiny import TEXT, write_model

CONTEXT = 64
#: More tokens than the context.
LONG = "fox " * 3 * CONTEXT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bounded") / "small", attention="qwen35")


async def new_session(server: Served) -> str:
    answer = await server.http.post("/v1/sessions", json={})
    return str(answer.json()["session"])


async def shown(server: Served, session: str) -> dict[str, Any]:
    return dict((await server.http.get(f"/v1/sessions/{session}")).json())


@pytest.mark.process
async def test_text_ends_at_the_context_and_a_longer_prompt_is_refused(model: Path) -> None:
    async with served(str(model), context=CONTEXT) as server:
        answer = await server.complete("Once", max_tokens=1000)
        usage = answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "length"
        assert usage["total_tokens"] == CONTEXT
        refusal = await server.http.post("/v1/completions", json={"prompt": LONG})
        assert refusal.status_code == 400
        error = refusal.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert re.search(rf"would have \d+ tokens.* context is {CONTEXT} ", error["message"])


@pytest.mark.process
async def test_prompt_beyond_the_context_is_refused_by_the_name_of_its_field(model: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": LONG},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
        "/v1/responses": {"input": LONG},
        "/v1/embeddings": {"input": LONG},
        "/v1/score": {"prompt": LONG, "continuations": [" fox"]},
    }
    async with served(str(model), context=CONTEXT) as server:
        bodies[f"/v1/sessions/{await new_session(server)}/append"] = {"text": LONG}
        for route, body in bodies.items():
            refusal = await server.http.post(route, json=body)
            error, (field, *_) = refusal.json()["error"], body
            assert (refusal.status_code, error["code"]) == (400, "context_length_exceeded"), route
            assert error["param"] == field, route
            told = rf"{field}: the text would have \d+ tokens, .* context is {CONTEXT} "
            assert re.match(told, error["message"]), route


async def test_details_of_the_model_and_of_a_session(model: Path) -> None:
    async with served(str(model), context=CONTEXT) as server:
        (listed,) = (await server.http.get("/v1/models")).json()["data"]
        about, session = listed["everstream"], await new_session(server)
        assert (about["context"], about["past"]) == (CONTEXT, "stop")
        at_bound = about["fixed_state_bytes"] + CONTEXT * about["state_bytes_per_token"]
        assert about["state_bytes_per_session"] == at_bound
        assert sum(tensor["bytes"] for tensor in about["state"]) <= at_bound
        assert {tensor["name"] for tensor in about["state"]} == {"conv", "S", "k", "v"}
        await server.text("Once upon a time", session=session, max_tokens=10)
        found = await shown(server, session)
        blocks = -(-(found["position"] - 1) // 16)
        used = about["fixed_state_bytes"] + blocks * 16 * about["state_bytes_per_token"]
        assert found["state_bytes"] == used < at_bound


async def test_session_continues_under_another_context_after_a_restart(
    model: Path, tmp_path: Path
) -> None:
    """And not under one that it does not fit, nor under one where the past slides."""
    settings = {"store": str(tmp_path / "store"), "dtype": "float32", "backend": "native"}
    async with served(str(model), context=CONTEXT, **settings) as server:
        whole = await server.text("Once", max_tokens=48)
        session = await new_session(server)
        first = await server.text("Once", session=session, max_tokens=40)
    async with served(str(model), context=4 * CONTEXT, **settings) as server:
        second = await server.text("", session=session, max_tokens=8)
        assert (await shown(server, session))["position"] < CONTEXT
        assert len(await server.text("", session=session, max_tokens=100)) > 0
    assert first + second == whole
    async with served(str(model), context=CONTEXT, **settings) as server:
        answer = await server.complete("", session=session)
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "--context" in answer["error"]["message"]
    async with served(str(model), context=4 * CONTEXT, past="slide", **settings) as server:
        answer = await server.complete("", session=session)
        assert answer["error"]["code"] == "snapshot_mismatch"


async def test_sliding_session_is_exported_forked_rewound_and_has_no_end(model: Path) -> None:
    settings = {"dtype": "float32", "context": CONTEXT, "past": "slide", "signing_key": "k" * 20}
    async with served(str(model), **settings) as server, served(str(model), **settings) as other:
        session = await new_session(server)
        await server.text(LONG, session=session, max_tokens=1)
        file = (await server.http.get(f"/v1/sessions/{session}/export")).content
        answer = await server.http.post(f"/v1/sessions/{session}/fork", json={"n": 1})
        (copy,) = answer.json()["sessions"]
        taken = (await other.http.post("/v1/sessions/import", content=file)).json()
        at = (await shown(server, session))["position"]
        texts = [
            await server.text("", session=session, max_tokens=2 * CONTEXT),
            await server.text("", session=copy, max_tokens=2 * CONTEXT),
            await other.text("", session=taken["session"], max_tokens=2 * CONTEXT),
        ]
        await server.http.post(f"/v1/sessions/{session}/rewind", json={"at": at})
        texts.append(await server.text("", session=session, max_tokens=2 * CONTEXT))
        assert len(set(texts)) == 1


def test_commands_know_the_bound(model: Path, tmp_path: Path) -> None:
    table = everstream("inspect", model, "--context", "1000")
    assert re.search(r"context\W+1,008 tokens, then texts end", table)
    assert re.search(r"1,000,000\W+more than the context", table)
    assert "then old tokens slide out" in everstream("inspect", model, "--past", "slide")
    long = ("generate", "--model", model, "--context", "32", "--max-tokens", "100", "--seed", "1")
    short, endless = (everstream(*long, *past, "Once") for past in ((), ("--past", "slide")))
    assert endless.startswith(short.rstrip())
    assert len(short) < len(endless)
    assert "would have" in refused(*long, TEXT)
    state = ("state", "make", "--model", model, "--prompt", "Once", "--out", tmp_path / "s")
    everstream(*state)
    assert "Once" in everstream("state", "inspect", tmp_path / "s")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    score = ("eval", model, "--data", text, "--mode", "stream", "--context", "32")
    assert "--past slide" in refused(*score)
    slid, whole = (
        json.loads(everstream(*score[:-1], *bound))["bits_per_byte"]
        for bound in (("32", "--past", "slide"), ("512",))
    )
    assert slid != whole


async def test_bound_is_that_of_the_models_that_have_one(model: Path, tmp_path: Path) -> None:
    constant = write_model(tmp_path / "constant")
    async with served(f"a={constant}", f"b={model}", context=CONTEXT) as server:
        listed = (await server.http.get("/v1/models")).json()["data"]
        assert [each["everstream"]["context"] for each in listed] == [0, CONTEXT]


def test_bound_is_for_models_with_attention_layers(tmp_path: Path) -> None:
    constant = write_model(tmp_path / "constant")
    for flags in (("--context", "64"), ("--past", "slide")):
        assert "constant" in refused("generate", "--model", constant, *flags, "Once")
        serve = ("serve", "--store", "memory", *flags, "--model", f"a={constant}")
        assert "constant" in refused(*serve)
        quiet = (*serve, "--model", f"b={constant}", "--log-level", "error")
        assert "none has any" in refused(*quiet)
    assert "--context" in refused("serve", "--model", constant, "--context", "8")


async def test_windows_of_a_constant_state_are_shortened(tmp_path: Path) -> None:
    model = write_model(tmp_path / "windows", attention="llama-windows")
    config = json.loads((model / "config.json").read_text())
    config["windows"][-1]["window"] = 60
    (model / "config.json").write_text(json.dumps(config))
    settings = {"store": str(tmp_path / "store"), "dtype": "float32", "backend": "native"}
    sizes = []
    for context in (None, 32):
        async with served(str(model), context=context, **settings) as server:
            (listed,) = (await server.http.get("/v1/models")).json()["data"]
            about = listed["everstream"]
            sizes.append(about["state_bytes_per_session"])
            assert (about["context"], about["past"]) == (0, None)
            session = await new_session(server)
            assert await server.text(LONG, session=session, max_tokens=2 * CONTEXT)
    assert sizes[1] < sizes[0]
    async with served(str(model), **settings) as server:
        answer = await server.complete("", session=session)
        assert answer["error"]["code"] == "snapshot_mismatch"
    table = everstream("inspect", model, "--context", "32")
    assert re.search(rf"state of a session\W+{sizes[1]:,} bytes", table)
    assert "must be in 32.." in refused("serve", "--model", model, "--context", "10000")
    assert "texts have no end" in refused("serve", "--model", model, "--past", "slide")


async def test_windows_are_shortened_next_to_other_models(model: Path, tmp_path: Path) -> None:
    windows = write_model(tmp_path / "windows", attention="llama-windows")
    config = json.loads((windows / "config.json").read_text())
    config["windows"][-1]["window"] = 2 * CONTEXT - 4
    (windows / "config.json").write_text(json.dumps(config))
    sizes = []
    for context in (None, CONTEXT, 8 * CONTEXT):
        async with served(f"a={windows}", f"b={model}", context=context) as server:
            listed = (await server.http.get("/v1/models")).json()["data"]
            sizes.append(listed[0]["everstream"]["state_bytes_per_session"])
    assert sizes[1] < sizes[0] == sizes[2]
    async with served(f"a={windows}", f"b={windows}", context=CONTEXT) as server:
        listed = (await server.http.get("/v1/models")).json()["data"]
        assert [each["everstream"]["state_bytes_per_session"] for each in listed] == [sizes[1]] * 2
