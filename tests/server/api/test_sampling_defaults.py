"""Where a request does not say how tokens are drawn, every way in draws them the same way."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

from server.cli.generate import generate
from server.engine.sampling_defaults import DEFAULTS, FIELDS, published
from server.engine.types import SamplingParams
from tests.server.harness import Recorder, running

pytestmark = pytest.mark.process

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
}
#: OpenAI's own values, which leave the model's distribution as it is.
OFF = {name: getattr(SamplingParams(), name) for name in ("temperature", "top_p")}


def drawn(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in FIELDS}


@pytest.mark.parametrize("path", ROUTES)
async def test_what_is_not_given_is_the_default(path: str) -> None:
    engine = Recorder()
    async with running(engine) as server:
        response = await server.http.post(path, json={**ROUTES[path], "temperature": None})
        assert response.status_code == 200, response.text
    assert [drawn(one) for one in engine.sampling if one] == [published()]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_given_value_wins(path: str) -> None:
    engine = Recorder()
    async with running(engine) as server:
        response = await server.http.post(path, json={**ROUTES[path], **OFF})
        assert response.status_code == 200, response.text
    assert [drawn(one) for one in engine.sampling if one] == [published() | OFF]


async def test_responses_says_the_defaults_that_it_used() -> None:
    async with running(Recorder()) as server:
        answer = (await server.http.post("/v1/responses", json=ROUTES["/v1/responses"])).json()
    assert {name: answer[name] for name in OFF} == {name: published()[name] for name in OFF}


async def test_models_publish_the_defaults() -> None:
    async with running(Recorder()) as server:
        (model,) = (await server.http.get("/v1/models")).json()["data"]
    assert model["everstream"]["sampling"] == published()


def test_the_terminal_has_the_same_defaults() -> None:
    options = inspect.signature(generate).parameters
    here = {name: options[name].default for name in FIELDS if name in options}
    assert here == {name: value for name, value in published().items() if name in here}
    assert here.keys() >= {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


def test_published_are_all_that_differ_from_the_engine() -> None:
    off = SamplingParams()
    changed = {field.name for field in fields(off)} - set(FIELDS)
    assert replace(DEFAULTS, **{name: getattr(off, name) for name in FIELDS}) == off, changed
