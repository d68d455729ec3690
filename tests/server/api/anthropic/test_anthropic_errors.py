"""Errors in Anthropic's words: every code has a status and a type that its clients know."""

from __future__ import annotations

import json

import pytest

from server.api.anthropic.routes import ERRORS
from server.api.errors import OUTCOMES
from server.errors import InvalidRequest, RequestError, invalid

KNOWN = {
    *("invalid_request_error", "authentication_error", "permission_error", "not_found_error"),
    *("request_too_large", "rate_limit_error", "api_error", "overloaded_error", "timeout_error"),
}


def of_code(code: str) -> RequestError:
    error = RequestError("so it is")
    error.code = code  # type: ignore[misc]
    return error


@pytest.mark.parametrize("code", OUTCOMES)
def test_code_has_a_known_type_and_nearly_its_status(code: str) -> None:
    error = of_code(code)
    body = json.loads(ERRORS.body(error))
    assert body["type"] == "error"
    assert body["error"]["type"] in KNOWN
    assert (body["error"]["code"], body["error"]["message"]) == (code, "so it is")
    assert ERRORS.status(error) in (OUTCOMES[code].status, 529)
    assert (ERRORS.status(error) >= 500) == (OUTCOMES[code].status >= 500)


@pytest.mark.parametrize("code", ["draining", "capacity_exhausted", "too_many_connections"])
def test_server_without_room_is_overloaded(code: str) -> None:
    """By this Anthropic's clients come back later."""
    error = of_code(code)
    assert ERRORS.status(error) == 529
    assert json.loads(ERRORS.body(error))["error"]["type"] == "overloaded_error"


def test_field_is_named_and_threads_are_told_apart() -> None:
    """The Python package continues without a thread where it is told so in this way."""
    error: InvalidRequest = invalid("thread", "is not supported")
    shown = json.loads(ERRORS.body(error))["error"]
    assert (shown["param"], shown["type"]) == ("thread", "invalid_request_error")
    assert shown["details"]["error_code"] == "thread_unsupported_request"
    assert "details" not in json.loads(ERRORS.body(invalid("n", "is one")))["error"]
