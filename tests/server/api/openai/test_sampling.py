"""How tokens are drawn and where an answer ends, by every route: what is given, and defaults."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

from model.chat import ChatTemplate
from server.api.schemas.requests import Sampling
from server.cli.generate import generate
from server.engine.sampling import DEFAULTS, FIELDS, published
from server.engine.types import Dry, SamplingParams
from tests.fakes import MODEL
from tests.server.harness import Recorder, Running, running

pytestmark = pytest.mark.process

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ROUTES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
}
GIVEN: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 0.95,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": 7,
    "stop": ["\n\n\n", "END"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "logit_bias": {"5": -100, "6": 2.5},
}
DRY: dict[str, Any] = {
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", "User"],
}
#: OpenAI's own values, which leave the model's distribution as it is.
OFF = {name: getattr(SamplingParams(), name) for name in ("temperature", "top_p")}
#: Those that are greedy.
LEAST = {"temperature": 5e-324, "top_p": 0}
#: A template that its model has learnt.
OWN = ChatTemplate("{{ messages[0].content }}")


async def drawn_by(path: str, body: dict[str, Any], **settings: Any) -> SamplingParams:
    """What reaches the engine of ``body``."""
    engine = Recorder()
    async with running(engine, **settings) as server:
        answer = await server.http.post(path, json=ROUTES[path] | body)
        assert answer.status_code == 200, answer.text
    (params,) = engine.sampling
    assert params is not None
    return params


@pytest.mark.parametrize("path", ROUTES)
async def test_given_values_are_used(path: str) -> None:
    given = dict(GIVEN)
    if path == RESPONSES:
        given["max_output_tokens"] = given.pop("max_tokens")
    lists = {"stop": ("\n\n\n", "END"), "stop_token_ids": (3, 4)}
    expected = GIVEN | lists | {"logit_bias": ((5, -100), (6, 2.5))}
    assert await drawn_by(path, given) == SamplingParams(**expected)


def test_every_field_is_tried() -> None:
    """But for the log-probabilities and formats, which each route shows in its own way."""
    others = {"top_logprobs", "response_format", "repeat_last_n"} | DRY.keys()
    assert GIVEN.keys() == Sampling.model_fields.keys() - others


@pytest.mark.parametrize("path", ROUTES)
async def test_dry_is_one_value_with_the_tokens_of_its_breakers(path: str) -> None:
    """A breaker is the last token that it has behind a letter: of bytes its last byte."""
    params = await drawn_by(path, DRY)
    assert params.dry == Dry(0.8, 1.5, 3, 64, (ord("\n"), ord("r")))
    params = await drawn_by(path, DRY | {"dry_sequence_breakers": '["\\n", "User"]'})
    assert params.dry is not None
    assert params.dry.breakers == (ord("\n"), ord("r"))


@pytest.mark.parametrize("path", ROUTES)
async def test_dry_has_defaults_and_is_off_without_a_multiplier(path: str) -> None:
    params = await drawn_by(path, {"dry_multiplier": 0.8})
    assert params.dry == Dry(0.8, 1.75, 2, 256, tuple(map(ord, '\n:"*')))
    for given in ({"dry_base": 2}, {"dry_multiplier": 0}, DRY | {"dry_penalty_last_n": 0}):
        assert (await drawn_by(path, given)).dry is None
    for last_n in (-1, 256, 4096):
        params = await drawn_by(path, {"dry_multiplier": 1, "dry_penalty_last_n": last_n})
        assert params.dry is not None
        assert params.dry.penalty_last_n == 256


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("given", [{"temperature": None}, OFF, LEAST])
async def test_missing_values_are_defaults(path: str, given: dict[str, Any]) -> None:
    params = await drawn_by(path, given)
    found = {name: getattr(params, name) for name in FIELDS}
    assert found == published() | {n: v for n, v in given.items() if v is not None}


async def test_defaults_are_in_responses_and_in_the_model_description() -> None:
    async with running(Recorder()) as server:
        answer = (await server.http.post(RESPONSES, json=ROUTES[RESPONSES])).json()
        (model,) = (await server.http.get("/v1/models")).json()["data"]
    assert {name: answer[name] for name in OFF} == {name: published()[name] for name in OFF}
    assert model["everstream"]["sampling"] == published()


def test_the_terminal_leaves_the_defaults_to_the_model() -> None:
    options = inspect.signature(generate).parameters
    assert {options[name].default for name in FIELDS if name in options} == {None}


@pytest.mark.parametrize("path", ROUTES)
async def test_what_the_makers_of_a_model_say_wins_over_our_defaults(path: str) -> None:
    theirs = replace(MODEL, sampling=replace(DEFAULTS, temperature=0.2, top_k=20))
    params = await drawn_by(path, {"top_k": 30}, model=theirs)
    assert (params.temperature, params.top_k, params.top_p) == (0.2, 30, DEFAULTS.top_p)


def test_published_are_all_that_differ_from_the_engine() -> None:
    off = SamplingParams()
    changed = {field.name for field in fields(off)} - set(FIELDS)
    assert replace(DEFAULTS, **{name: getattr(off, name) for name in FIELDS}) == off, changed


@pytest.mark.parametrize(
    ("path", "given", "template", "limit", "expected"),
    [
        (CHAT, {}, OWN, 10**6, 4096),
        (CHAT, {}, OWN, 1000, 1000),
        (CHAT, {"n": 4}, OWN, 10**6, 1024),
        (CHAT, {"n": 16}, OWN, 10**6, 256),
        (CHAT, {}, ChatTemplate(), 10**6, 256),
        (CHAT, {"max_tokens": 7}, OWN, 10**6, 7),
        (CHAT, {"max_completion_tokens": 7}, OWN, 10**6, 7),
        (RESPONSES, {}, OWN, 10**6, 4096),
        (RESPONSES, {}, ChatTemplate(), 10**6, 256),
    ],
)
async def test_answer_without_a_bound_has_room_for_its_end(
    path: str, given: dict[str, Any], template: ChatTemplate, limit: int, expected: int
) -> None:
    settings = {"chat_template": template, "max_tokens_limit": limit}
    assert (await drawn_by(path, given, **settings)).max_tokens == expected


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_label_changes_nothing(server: Running, path: str) -> None:
    body = ROUTES[path] | {"max_tokens": 4, "seed": 1}
    labels = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "x" * 256)
    plain = (await server.http.post(path, json=body)).json()
    labelled = (await server.http.post(path, json=body | labels)).json()
    assert (labelled["choices"], labelled["usage"]) == (plain["choices"], plain["usage"])
