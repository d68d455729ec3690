"""Drafts in a real server: what asks for them, how they are counted, and that no text changes."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.checkpoint import load_checkpoint
from model.state import StateLayout
from server.config import ModelSource, ServerConfig
from server.engine.drafts import MAX_STREAMS, DraftCosts, SuffixDrafter
from server.engine.model_drafter import HeadDrafter
from server.models.backend import open_backend
from server.models.build import (
    DraftModelError,
    Measure,
    ModelBuilder,
    _num_sessions,
    build_models,
    check_draft_model,
    measured_costs,
    open_drafter,
)
from server.models.registry import ModelBroken
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.requirements import needs_native
from tests.server.harness import receive_until, send
from tests.server.served import Served, served
from tests.tiny import tiny_checkpoint, write_model, write_model_with_head

pytestmark = [needs_native, pytest.mark.process]

#: Leaves two tokens, so that the text repeats itself.
LOOP = {"logit_bias": {"40": 90, "41": 90}, "max_tokens": 60, "seed": 5, "ignore_eos": True}
DETAILS = "completion_tokens_details"
MESSAGES = [{"role": "user", "content": "Once upon a time there was a fox."}]


#: More rows cost nothing, and drafts neither, whatever this machine needs for them.
FREE_ROWS, FREE_DRAFTS = DraftCosts((1.0,) * 5), DraftCosts((0.0,) * 5)


def in_turn(*costs: DraftCosts) -> Measure:
    """What is measured first of the model, and then of what drafts for it."""
    left = iter(costs)
    return lambda runner, pool: next(left)


@pytest.fixture
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("drafting")
    model, measure = str(write_model(folder / "a")), in_turn(FREE_ROWS)
    async with served(model, measure=measure, speculation="auto", store="memory") as started:
        yield started


async def chat(server: Served, **body: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 3, "ignore_eos": True, **body}
    answer = await server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_text_with_and_without_speculation_is_the_same(server: Served) -> None:
    drafted = await server.complete(**LOOP)
    plain = await server.complete(**LOOP, speculation="off")
    assert drafted["choices"] == plain["choices"]
    details = drafted["usage"].pop(DETAILS)
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0
    assert drafted["usage"] == plain["usage"], "without drafts there are no details"
    assert (await server.complete(**LOOP, speculation="auto"))["usage"][DETAILS]


async def test_frames_count_drafts(server: Served) -> None:
    async with server.socket() as socket:
        body = {"type": "generate", "prompt": "Once", **LOOP}
        await send(socket, request_id="a", **body)
        drafted = await receive_until(socket, "finished")
        await send(socket, request_id="b", **body, speculation="off")
        plain = await receive_until(socket, "finished")
    ids = [[f["token_id"] for f in frames if f["type"] == "token"] for frames in (drafted, plain)]
    assert ids[0] == ids[1]
    assert drafted[-1]["usage"][DETAILS]["accepted_prediction_tokens"] > 0
    assert DETAILS not in plain[-1]["usage"]


async def test_metrics_count_drafts(server: Served) -> None:
    details = (await server.complete(**LOOP))["usage"][DETAILS]
    text = (await server.http.get("/metrics")).text
    for result in ("accepted", "rejected"):
        line = f'everstream_draft_tokens_total{{model="a",result="{result}"}}'
        (found,) = (each for each in text.splitlines() if each.startswith(line))
        assert float(found.split()[-1]) == details[f"{result}_prediction_tokens"]


@pytest.mark.parametrize("parts", [False, True])
async def test_predicted_answer_is_accepted(server: Served, parts: bool) -> None:
    plain = await chat(server, speculation="off")
    text = plain["choices"][0]["message"]["content"]
    content = [{"type": "text", "text": text}] if parts else text
    predicted = await chat(server, prediction={"type": "content", "content": content})
    assert predicted["choices"][0]["message"] == plain["choices"][0]["message"]
    unpredicted = (await chat(server))["usage"].get(DETAILS, {"accepted_prediction_tokens": 0})
    details = predicted["usage"][DETAILS]
    assert details["accepted_prediction_tokens"] > unpredicted["accepted_prediction_tokens"]


async def test_usage_says_so_where_nothing_of_a_prediction_was_right(server: Served) -> None:
    prediction = {"type": "content", "content": "zzzz"}
    answer = await chat(server, prediction=prediction, speculation="off")
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    assert answer["usage"][DETAILS] == dict.fromkeys(names, 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"speculation": "on"}, "speculation"),
        ({"speculation": True}, "speculation"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
        ({"prediction": "x"}, "prediction"),
    ],
)
async def test_bad_values_are_refused_by_name(
    server: Served, body: dict[str, Any], param: str
) -> None:
    answer = await server.http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


async def test_prediction_has_the_bound_of_prompts(tmp_path: Any) -> None:
    write_model(tmp_path / "a")
    async with served(str(tmp_path / "a"), max_prompt_tokens=50, store="memory") as server:
        body = {"messages": MESSAGES[:1], "max_tokens": 1}
        prediction = {"type": "content", "content": "fox " * 200}
        answer = await server.http.post(
            "/v1/chat/completions", json={**body, "prediction": prediction}
        )
        assert answer.json()["error"]["param"] == "prediction"


def test_costs_are_measured_on_the_runner() -> None:
    from model.state import StateLayout
    from server.engine.runner import CpuStatePool

    backend = open_backend(tiny_checkpoint(), "native", threads=1)
    pool = CpuStatePool(StateLayout.of(backend.config), 1)
    costs = measured_costs(backend.make_runner(pool), pool)
    assert all(0 < seconds < 60 for seconds in costs.times_s)
    assert 0 <= costs.keep_s < 60


def test_nothing_is_drafted_on_torch(caplog: pytest.LogCaptureFixture) -> None:
    """Chunks have other bits there than single steps."""
    with caplog.at_level(logging.DEBUG, "everstream.speculation"):
        assert open_drafter(open_backend(tiny_checkpoint(), "torch")) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "no tokens are drafted: on torch the bits depend on the chunks"


def test_server_drafts_by_default_where_its_times_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERSTREAM_SPECULATION")
    model = write_model(tmp_path / "a")
    with ServerProcess("--model", model, "--threads", 1, "--log-level", "debug") as server:
        assert re.search(r"tokens are drafted.*: calls of 1, 2, 4, 8, 16 rows take", server.log())
        url = f"{server.url}/v1/completions"
        drafted, plain = (
            httpx.post(url, json={"prompt": "Once", **LOOP, **more}, timeout=STUCK_S).json()
            for more in ({}, {"speculation": "off"})
        )
    assert drafted["choices"] == plain["choices"]


@pytest.mark.parametrize("pays", [False, True])
def test_drafter_is_there_where_it_pays(pays: bool, caplog: pytest.LogCaptureFixture) -> None:
    times = (1.0, 1.0, 1.1, 1.2, 1.3) if pays else (1.0, 2.0, 4.0, 8.0, 16.0)
    backend = open_backend(tiny_checkpoint(), "native", threads=1)
    with caplog.at_level(logging.DEBUG, "everstream.speculation"):
        drafter = open_drafter(backend, measure=in_turn(DraftCosts(times)))
    assert (drafter is not None) == pays
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("tokens are drafted" if pays else "no tokens are drafted, it would not")


# A draft model


async def test_draft_model_changes_no_text_and_is_counted(tmp_path: Path) -> None:
    measure = in_turn(FREE_ROWS, FREE_DRAFTS)
    write_model(tmp_path / "a")
    write_model(tmp_path / "small")
    settings = {"store": "memory", "speculation": "auto", "draft_model": str(tmp_path / "small")}
    sampling = {"max_tokens": 60, "seed": 5, "ignore_eos": True}
    async with served(str(tmp_path / "a"), measure=measure, **settings) as server:
        drafted = await server.complete(**sampling)
        plain = await server.complete(**sampling, speculation="off")
        text = (await server.http.get("/metrics")).text
    assert drafted["choices"] == plain["choices"]
    line = 'everstream_model_draft_tokens_total{model="a",result="accepted"}'
    (found,) = (each for each in text.splitlines() if each.startswith(line))
    assert float(found.split()[-1]) > 30


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("everstream-stories", "--draft-model: it has another vocabulary than the model"),
        ("none/such", "--draft-model: "),
    ],
)
def test_draft_model_that_cannot_draft_is_refused_by_its_flag(
    tmp_path: Path, draft: str, message: str
) -> None:
    write_model(tmp_path / "a")
    source = ModelSource("a", str(tmp_path / "a"))
    draft = str(tmp_path / draft) if "/" in draft else draft
    config = ServerConfig(
        model=(source,), speculation="auto", draft_model=draft, store="memory", max_sessions=2
    )
    with pytest.raises(ModelBroken, match=message):
        build_models(config)


def test_draft_model_is_not_used_on_torch_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(write_model(tmp_path / "a"))
    config = ServerConfig(
        model=(ModelSource("a", model),),
        backend="torch",
        draft_model=model,
        store="memory",
        max_sessions=2,
    )
    with caplog.at_level(logging.DEBUG, "everstream.speculation"):
        build_models(config)
    first, _ = [record.getMessage() for record in caplog.records]
    assert first == "--draft-model is not used: it needs the native runtime"


def test_draft_model_with_a_bounded_past_is_refused() -> None:
    check_draft_model(tiny_checkpoint(), tiny_checkpoint("rwkv7"))
    with pytest.raises(DraftModelError, match="--draft-model: a model with attention layers"):
        check_draft_model(tiny_checkpoint(), tiny_checkpoint("lfm2"))


def test_states_of_a_draft_model_are_part_of_the_state_memory() -> None:
    state_bytes = StateLayout.of(tiny_checkpoint().config).num_bytes
    config = ServerConfig(state_memory=20 * state_bytes)
    assert _num_sessions("a", tiny_checkpoint(), config, None) == 20
    draft = tiny_checkpoint().config
    assert _num_sessions("a", tiny_checkpoint(), config, draft) == 20 - MAX_STREAMS
    config = ServerConfig(state_memory=MAX_STREAMS * state_bytes)
    with pytest.raises(ModelBroken, match="--state-memory"):
        _num_sessions("a", tiny_checkpoint(), config, draft)


# A multi-token head


async def test_head_changes_no_text_and_is_counted(tmp_path: Path) -> None:
    model, measure = str(write_model_with_head(tmp_path / "a")), in_turn(FREE_ROWS, FREE_DRAFTS)
    sampling = {"max_tokens": 60, "seed": 5, "ignore_eos": True}
    async with served(model, measure=measure, speculation="auto", store="memory") as server:
        drafted = await server.complete(**sampling)
        plain = await server.complete(**sampling, speculation="off")
        text = (await server.http.get("/metrics")).text
    assert drafted["choices"] == plain["choices"]
    line = 'everstream_model_draft_tokens_total{model="a",result="accepted"}'
    (found,) = (each for each in text.splitlines() if each.startswith(line))
    assert float(found.split()[-1]) > 0


@pytest.mark.parametrize("pays", [False, True])
def test_head_drafts_where_it_pays(
    pays: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_model, of_head = DraftCosts((1.0, 1.0, 1.1, 1.2, 1.3)), (0.1 if pays else 1.0,) * 5
    checkpoint = load_checkpoint(write_model_with_head(tmp_path / "a"))
    backend = open_backend(checkpoint, "native", threads=1)
    with caplog.at_level(logging.INFO, "everstream.speculation"):
        drafter = open_drafter(backend, measure=in_turn(of_model, DraftCosts(of_head)))
    assert type(drafter) is (HeadDrafter if pays else SuffixDrafter)
    (line,) = caplog.messages
    does = "drafts where that pays" if pays else "drafts none"
    assert (
        line == f"the multi-token head takes {100 if pays else 1000}.00 ms for a draft: it {does}"
    )


def test_model_with_a_head_drafts_nothing_on_torch(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_model_with_head(tmp_path / "a"))
    assert checkpoint.head is not None
    assert open_drafter(open_backend(checkpoint, "torch")) is None


def test_head_is_left_out_where_its_states_have_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model_with_head(tmp_path / "a")
    source = ModelSource("a", str(folder))
    room = StateLayout.of(load_checkpoint(folder).config).num_bytes
    for state_memory, has_head in ((room, False), (1 << 30, True)):
        config = ServerConfig(model=[source], state_memory=state_memory, context=32)
        with caplog.at_level(logging.INFO, "everstream"):
            checkpoint = ModelBuilder(config).read(source)
        assert (checkpoint.head is not None) == has_head
        assert ("no room" in caplog.text) != has_head
        caplog.clear()
