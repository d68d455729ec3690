"""04: what a client has sent comes back neither at length nor in a log, whatever is wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from server.api.chat.messages import FunctionDefinition
from server.api.errors import MAX_MESSAGE_CHARS, error_object
from server.api.schemas.requests import FormatPart, JsonSchema
from server.api.schemas.wire import Wire
from server.errors import invalid
from server.store.base import SnapshotMismatch
from server.store.states import check_identity
from tests.security.test_01_names import kinds
from tests.server.harness import Running
from tests.server.one_model import SIGNING

SECRET = "the-client's-own-words"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"secret": SECRET}
    for _ in range(levels):
        value = {"a": value}
    return value


TOOLS = {
    "long description": {"description": SECRET * 1000},
    "deep parameters": {"parameters": nested(70)},
    "large parameters": {"parameters": {"type": "object", "description": SECRET * 4000}},
    "large number": {"parameters": {"type": "object", "maximum": 2**70, "title": SECRET}},
    "name": {"name": SECRET},
}


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_bad_tool_is_a_400_that_names_it(
    server: Running, path: str, tool: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    function = {"name": "f", **tool}
    body: dict[str, Any] = {"input": "a", "tools": [{"type": "function", **function}]}
    if "chat" in path:
        body = {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": function}],
        }
    body["tool_choice"] = "required"
    with caplog.at_level(logging.DEBUG):
        answer = await server.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"].startswith("tools")
    assert SECRET not in answer.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("model", [*kinds(Wire), *kinds(FormatPart)], ids=lambda m: m.__name__)
def test_no_model_of_the_wire_repeats_its_input(model: type[BaseModel]) -> None:
    assert model.model_config["hide_input_in_errors"]


def test_our_own_use_of_the_models_repeats_nothing() -> None:
    for make in (
        lambda: FunctionDefinition(name=SECRET),
        lambda: JsonSchema(name=SECRET, schema={}),
    ):
        with pytest.raises(ValidationError) as found:
            make()
        assert SECRET not in str(found.value)


def test_message_of_an_error_is_bounded() -> None:
    assert len(error_object(invalid("a", "b" * 1_000_000))["message"]) == MAX_MESSAGE_CHARS


def test_import_of_another_model_repeats_little() -> None:
    identity = SIGNING.identity
    about = dict.fromkeys(identity.labels, "x" * 500000)
    with pytest.raises(SnapshotMismatch) as found:
        check_identity(about, identity)
    assert len(found.value.message) < 1000


async def test_id_of_a_response_is_repeated_in_part(server: Running) -> None:
    answer = await server.http.get("/v1/responses/" + "r" * 20_000)
    assert answer.status_code == 404
    assert len(answer.content) < 1000
