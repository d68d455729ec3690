"""Each class of errors that the package knows, and what it does about them by itself."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import openai
import pytest
from served import BASE, ENDLESS, MODEL, PROMPT, QUESTION, SERVER, client


def test_bad_value_is_a_bad_request() -> None:
    with client() as api, pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model=MODEL, prompt=PROMPT, temperature=9)
    assert (caught.value.status_code, caught.value.param) == (400, "temperature")
    assert caught.value.code == "invalid_value"


def test_wrong_key_is_an_authentication_error() -> None:
    with client("wrong") as api, pytest.raises(openai.AuthenticationError) as caught:
        api.models.list()
    assert caught.value.code == "invalid_api_key"


def test_key_without_the_scope_is_a_permission_error() -> None:
    with client("reader") as api, pytest.raises(openai.PermissionDeniedError) as caught:
        api.completions.create(model=MODEL, prompt=PROMPT)
    assert caught.value.code == "scope_missing"


@pytest.mark.parametrize("route", ["completions", "chat", "responses", "embeddings"])
def test_unknown_model_is_not_found(route: str) -> None:
    with client() as api:
        ask: dict[str, Callable[[], object]] = {
            "completions": lambda: api.completions.create(model="gpt-9", prompt=PROMPT),
            "chat": lambda: api.chat.completions.create(model="gpt-9", messages=QUESTION),
            "responses": lambda: api.responses.create(model="gpt-9", input=PROMPT),
            "embeddings": lambda: api.embeddings.create(model="gpt-9", input=PROMPT),
        }
        with pytest.raises(openai.NotFoundError) as caught:
            ask[route]()
    assert caught.value.code == "model_not_found"


def test_unknown_response_is_not_found() -> None:
    with client() as api, pytest.raises(openai.NotFoundError):
        api.responses.retrieve("resp_" + "0" * 32)


def test_session_that_is_in_use_is_a_conflict() -> None:
    with client() as api:
        first = api.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=2, extra_body={"keep": True}
        )
        session = {"session": first.model_extra["session"]}
        endless = {"prompt": " and", "max_tokens": 1_000_000, "extra_body": {**session, **ENDLESS}}
        with api.completions.create(model=MODEL, stream=True, **endless) as stream:
            next(iter(stream))
            with pytest.raises(openai.ConflictError):
                api.completions.create(model=MODEL, prompt=" or", max_tokens=2, extra_body=session)
        url, headers = f"{BASE}/sessions/{session['session']}", {"authorization": "Bearer usual"}
        assert httpx2.delete(url, headers=headers, timeout=60).status_code == 200


def test_used_up_limit_is_a_rate_limit_error_and_a_retry_waits_for_it() -> None:
    with client("limited") as api:
        with pytest.raises(openai.RateLimitError) as caught:
            [api.models.list() for _ in range(1000)]
        assert caught.value.code == "rate_limited"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert api.with_options(max_retries=5).models.list().data


def test_unreachable_server_is_a_connection_error() -> None:
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0) as api,
        pytest.raises(openai.APIConnectionError),
    ):
        api.models.list()


def test_impatient_client_gets_a_timeout() -> None:
    # A text that ends early is no test of patience.
    endless = {"prompt": PROMPT, "max_tokens": 1_000_000, "extra_body": ENDLESS}
    with (
        client(timeout=httpx2.Timeout(60, read=0.05)) as api,
        pytest.raises(openai.APITimeoutError),
    ):
        api.completions.create(model=MODEL, **endless)


def test_unknown_route_has_an_error_of_the_same_shape() -> None:
    answer = httpx2.get(f"{BASE}/nothing", headers={"authorization": "Bearer usual"}, timeout=60)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_health_needs_no_key() -> None:
    assert httpx2.get(f"{SERVER}/health", timeout=60).status_code == 200
