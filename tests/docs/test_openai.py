"""openai.md names every field of every route of OpenAI's, and what is refused of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from server.api.errors import error_body
from server.api.openai.bodies import (
    HARMLESS,
    OTHER_NAMES,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    Labels,
    ScoreBody,
    TokenizeBody,
)
from server.api.openai.chat import ChatBody
from server.api.openai.responses.items import ResponseCreate, ResponsesBody
from server.api.schemas.requests import Sampling
from server.api.schemas.wire import Refusal, Wire, parse_body
from server.engine.sampling import DEFAULTS, FIELDS
from server.errors import InvalidRequest
from tests.docs.pages import json_examples, names, page, rows, section

ROOT = Path(__file__).parent.parent.parent
TEXT = page("openai.md")
#: The tests of each field, by section and field.
TESTED = json.loads((Path(__file__).parent / "fields_tested.json").read_text("utf-8"))

#: The section of each body.
BODIES: dict[str, type[Wire]] = {
    "Sampling": Sampling,
    "Completions": CompletionBody,
    "Chat": ChatBody,
    "Responses": ResponsesBody,
    "Responses over a WebSocket": ResponseCreate,
    "Embeddings": EmbeddingsBody,
    "Scores": ScoreBody,
    "Text to tokens": TokenizeBody,
    "Tokens to text": DetokenizeBody,
}


def table(heading: str) -> dict[str, list[str]]:
    """The rows of a section by their field."""
    found: dict[str, list[str]] = {}
    for row in rows(section(TEXT, heading)):
        for name in names(row[0]):
            assert name not in found, name
            found[name] = row
    return found


def own_fields(body: type[Wire]) -> set[str]:
    """Those that a body does not share with the one that it extends."""
    bases = [base for base in BODIES.values() if base is not body and issubclass(body, base)]
    theirs = {name: base.model_fields[name] for base in bases for name in base.model_fields}
    return {
        name
        for name, field in body.model_fields.items()
        if name not in theirs or repr(theirs[name]) != repr(field)
    }


@pytest.mark.parametrize("heading", BODIES)
def test_table_has_every_field_of_a_body(heading: str) -> None:
    assert table(heading).keys() == own_fields(BODIES[heading])


@pytest.mark.parametrize("heading", BODIES)
def test_field_is_tested_in_the_files_that_are_listed(heading: str) -> None:
    tested = TESTED[heading]
    assert tested.keys() == table(heading).keys()
    for name, files in tested.items():
        assert files, name
        for file in files:
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"\b{name}\b", text), f"{name} is not in {file}"


def test_error_is_what_the_server_says() -> None:
    (example,) = json_examples(TEXT)
    with pytest.raises(InvalidRequest) as caught:
        parse_body(CompletionBody, b'{"prompt": "a", "suffix": "b"}')
    assert json.loads(error_body(caught.value)) == example


def refusals() -> set[tuple[str, str]]:
    """Section and field."""
    return {(heading, name) for heading, body in BODIES.items() for name in refused_of(body)}


def refused_of(body: type[Wire]) -> Mapping[str, Refusal]:
    """What a body refuses itself; what it declares is no refusal."""
    inherited = {
        name: refusal
        for base in BODIES.values()
        if base is not body and issubclass(body, base)
        for name, refusal in base.refused.items()
    }
    return {
        name: refusal
        for name, refusal in body.refused.items()
        if name not in body.model_fields and inherited.get(name) != refusal
    }


def test_table_of_refusals_is_what_the_server_refuses() -> None:
    found = [
        (heading, name)
        for row in rows(section(TEXT, "Refused"))
        for heading in row[1].split(", ")
        for name in names(row[0])
    ]
    assert len(found) == len(set(found))
    assert set(found) == refusals()


def test_tables_have_every_other_name_and_every_field_without_effect() -> None:
    mapped = {name: names(row[1])[0] for name, row in table("Other names").items()}
    assert mapped == OTHER_NAMES
    assert table("Without effect").keys() == HARMLESS | Labels.model_fields.keys()


def test_table_has_every_default_of_sampling() -> None:
    defaults = {name: row[1] for name, row in table("Sampling").items()}
    params = asdict(DEFAULTS)
    numbers = {name: f"{params[name]:g}" for name in ("max_tokens", *FIELDS)}
    assert {name: defaults[name] for name in numbers} == numbers
