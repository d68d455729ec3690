"""reference/anthropic.md names every field of Anthropic's bodies, and says what becomes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import orjson
import pytest

from server.api.anthropic import body as bodies
from server.api.anthropic.body import BILLING, CountBody, MessagesBody
from server.api.anthropic.routes import ERRORS
from server.api.schemas.wire import Wire, field_names, parse_body
from server.errors import InvalidRequest
from tests.docs.pages import DOCS, json_examples, names, rows, section

TEXT = (DOCS / "reference" / "anthropic.md").read_text("utf-8")
TESTS = Path(__file__).parent.parent
TESTED = "\n".join(
    path.read_text("utf-8")
    for folder in ("server/api/anthropic", "compat/anthropic", "compat/anthropic_node")
    for path in sorted((TESTS / folder).iterdir())
    if path.suffix in (".py", ".mjs")
)

PARTS: dict[str, type[Wire]] = {
    "text of the user, the system, a tool": bodies.GivenText,
    "text of the assistant": bodies.SaidText,
    "thinking": bodies.ThinkingBlock,
    "redacted thinking, which nothing can read": bodies.RedactedThinking,
    "call of a tool": bodies.ToolUseBlock,
    "result of a tool": bodies.ToolResult,
    "tool": bodies.ClientTool,
}


def fields_in(heading: str) -> list[str]:
    return [name for row in rows(section(TEXT, heading)) for name in names(row[0])]


def test_tables_have_every_field_of_the_bodies() -> None:
    counted, message = fields_in("Counting tokens"), fields_in("Messages")
    assert sorted(counted) == sorted(field_names(CountBody))
    assert sorted(message) == sorted(field_names(MessagesBody) - field_names(CountBody))


def test_table_has_every_field_of_blocks_and_tools() -> None:
    shown = {row[0]: set(names(row[1])) for row in rows(section(TEXT, "Blocks and tools"))}
    assert shown == {part: field_names(model) for part, model in PARTS.items()}


def test_table_has_every_field_without_effect() -> None:
    hints = set[str]().union(*(model.hints for model in (MessagesBody, *PARTS.values())))
    shown = fields_in("No effect")
    assert len(shown) == len(set(shown))
    assert set(shown) == hints


def test_table_has_every_field_that_is_refused() -> None:
    assert sorted(fields_in("Refused")) == sorted(MessagesBody.refused)


@pytest.mark.parametrize("name", sorted(field_names(MessagesBody) | MessagesBody.hints))
def test_field_is_in_a_test(name: str) -> None:
    assert re.search(rf"\b{name}\b", TESTED), name


@pytest.mark.parametrize("model", [bodies.ThinkingOn, bodies.OutputConfig, bodies.OneToolChoice])
def test_page_names_the_fields_of_options(model: type[Wire]) -> None:
    for name in field_names(model) - {"name", "type"}:
        assert re.search(rf"\b{name}\b", TEXT), name


def test_page_names_every_kind_of_choice() -> None:
    for model in (bodies.AutoChoice, bodies.OneToolChoice, bodies.NoToolChoice):
        for kind in get_args(model.model_fields["type"].annotation):
            assert f"`{kind}`" in TEXT
    for model in (bodies.ThinkingOn, bodies.ThinkingAdaptive, bodies.ThinkingOff):
        for kind in get_args(model.model_fields["type"].annotation):
            assert f"`{kind}`" in TEXT


def test_page_names_the_line_that_is_left_out() -> None:
    assert f"`{BILLING} ...`" in TEXT


def test_error_is_what_the_server_says() -> None:
    (example,) = json_examples(TEXT)
    given = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "temprature": 1}
    with pytest.raises(InvalidRequest) as caught:
        parse_body(MessagesBody, orjson.dumps(given))
    assert json.loads(ERRORS.body(caught.value)) == example
