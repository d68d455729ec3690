"""What other servers know and this one does not is refused by name, unless it asks for nothing."""

from __future__ import annotations

import json

import pytest

from server.api.openai.bodies import CompletionBody, EmbeddingsBody
from server.api.openai.unsupported import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from server.api.schemas.parse import parse_body
from server.api.schemas.wire import Refusal
from server.errors import InvalidRequest

TABLES = {"completions": COMPLETIONS, "chat": CHAT, "responses": RESPONSES, "embed": EMBEDDINGS}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_field_is_refused_with_its_name_and_a_reason(name: str) -> None:
    body = json.dumps({"prompt": "hi", name: "something else"})
    with pytest.raises(InvalidRequest) as raised:
        parse_body(CompletionBody, body.encode())
    assert raised.value.param == name
    assert raised.value.message == f"{name}: {COMPLETIONS[name].message}"


@pytest.mark.parametrize("name", COMPLETIONS)
def test_null_and_the_default_are_accepted(name: str) -> None:
    for value in (None, *COMPLETIONS[name].accepted):
        body = json.dumps({"prompt": "hi", name: value})
        assert parse_body(CompletionBody, body.encode()) == CompletionBody(prompt="hi")


@pytest.mark.parametrize(
    ("default", "value", "accepted"),
    [
        (False, False, True),
        (False, 0, False),
        (True, 1, False),
        (0, False, False),
        (1.0, 1, True),
        ([], [], True),
        ([], {}, False),
        ("auto", "Auto", False),
    ],
)
def test_default_is_of_the_same_kind(default: object, value: object, accepted: bool) -> None:
    assert Refusal("no", (default,)).accepts(value) is accepted


def test_reason_follows_the_field_name() -> None:
    assert COMPLETIONS["suffix"].message.startswith("is not supported: the model cannot")
    assert COMPLETIONS["max_completion_tokens"].message == "is called max_tokens here"


def test_what_a_body_declares_is_never_refused() -> None:
    class Later(CompletionBody):
        suffix: str | None = None

    assert parse_body(Later, b'{"prompt": "hi", "suffix": "x"}').suffix == "x"


def test_embeddings_have_a_table_of_their_own() -> None:
    with pytest.raises(InvalidRequest, match="hidden size"):
        parse_body(EmbeddingsBody, b'{"input": "hi", "dimensions": 64}')


@pytest.mark.parametrize("table", TABLES)
def test_reasons_are_sentences_that_can_follow_a_name(table: str) -> None:
    for name, refusal in TABLES[table].items():
        assert refusal.reason and not refusal.reason.endswith("."), name
        assert len(refusal.reason) < 120, name
