"""What other servers know and this one does not is refused by name, unless it asks for nothing."""

from __future__ import annotations

import json

import pytest

from server.api.openai.bodies import COMPLETIONS, CompletionBody, EmbeddingsBody
from server.api.schemas.wire import Refusal, parse_body
from server.errors import InvalidRequest


def test_field_is_refused_with_its_name_and_a_reason() -> None:
    for name in COMPLETIONS:
        body = json.dumps({"prompt": "hi", name: "something else"})
        with pytest.raises(InvalidRequest) as raised:
            parse_body(CompletionBody, body.encode())
        assert raised.value.param == name
        assert raised.value.message == f"{name}: {COMPLETIONS[name].message}"


def test_null_and_the_default_are_accepted() -> None:
    for name, refusal in COMPLETIONS.items():
        for value in (None, *refusal.accepted):
            body = json.dumps({"prompt": "hi", name: value})
            assert parse_body(CompletionBody, body.encode()) == CompletionBody(prompt="hi"), name


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


def test_what_a_body_declares_is_never_refused() -> None:
    class Later(CompletionBody):
        suffix: str | None = None

    assert parse_body(Later, b'{"prompt": "hi", "suffix": "x"}').suffix == "x"


def test_embeddings_have_a_table_of_their_own() -> None:
    with pytest.raises(InvalidRequest, match="hidden size"):
        parse_body(EmbeddingsBody, b'{"input": "hi", "dimensions": 64}')
