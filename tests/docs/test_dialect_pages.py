"""ollama.md and llama-server.md name every field of the bodies, and say what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import NoneType

import pytest

from server.api import llama_server as llama
from server.api.llama_server import DIALECT as LLAMA_SERVER
from server.api.llama_server import ERRORS as LLAMA_ERRORS
from server.api.ollama import body as ollama
from server.api.ollama.routes import DIALECT as OLLAMA
from server.api.ollama.routes import ERRORS as OLLAMA_ERRORS
from server.api.schemas.wire import Wire, parse_body
from server.errors import InvalidRequest, RequestError
from tests.docs.pages import json_examples, names, page, rows, section

#: Page and section -> the bodies with these fields, without those that the page says are above.
TABLES: dict[tuple[str, str], tuple[type[Wire], ...]] = {
    ("ollama.md", "Chat"): (ollama.OllamaChatBody,),
    ("ollama.md", "Messages"): (ollama.OllamaMessage,),
    ("ollama.md", "Generate"): (ollama.GenerateBody,),
    ("ollama.md", "Options"): (ollama.OllamaOptions,),
    ("ollama.md", "Vectors"): (ollama.EmbedBody, ollama.OldEmbeddingsBody),
    ("ollama.md", "Show"): (ollama.ShowBody,),
    ("llama-server.md", "Completion"): (llama.LlamaCompletionBody,),
    ("llama-server.md", "Infill"): (llama.InfillBody,),
    ("llama-server.md", "Text and tokens"): (llama.RenderBody,),
}


def shown(page_name: str, heading: str) -> dict[str, str]:
    """What becomes of each field, by the page."""
    found: dict[str, str] = {}
    for row in rows(section(page(page_name), heading)):
        for name in names(row[0]):
            assert name not in found, name
            found[name] = row[1]
    return found


def become(body: type[Wire]) -> dict[str, str]:
    """What becomes of each field, by the code: one that can only be null is refused."""
    fields = body.model_fields.items()
    found = dict.fromkeys(body.refused, "refused") | dict.fromkeys(body.hints, "no effect")
    found |= dict.fromkeys(body.other_names, "mapped")
    return found | {
        name: "refused" if field.annotation is NoneType else "mapped" for name, field in fields
    }


@pytest.mark.parametrize(("page_name", "heading"), TABLES)
def test_table_has_every_field_and_what_becomes_of_it(page_name: str, heading: str) -> None:
    wanted: dict[str, str] = {}
    for body in TABLES[page_name, heading]:
        wanted |= become(body)
    if heading == "Infill":
        above = become(llama.LlamaCompletionBody)
        wanted = {name: kind for name, kind in wanted.items() if name not in above}
    assert shown(page_name, heading) == wanted


@pytest.mark.parametrize(
    ("name", "dialect"), [("ollama.md", OLLAMA), ("llama-server.md", LLAMA_SERVER)]
)
def test_page_has_every_route(name: str, dialect: object) -> None:
    head = page(name).partition("\n## ")[0]
    listed = {route.partition(" ")[2] for row in rows(head) for route in names(row[0])}
    assert {route.path for route in dialect.router.routes} <= listed  # type: ignore[attr-defined]


def test_errors_are_what_the_server_says() -> None:
    said: list[tuple[str, type[Wire], bytes, Callable[[RequestError], bytes]]] = [
        (
            "ollama.md",
            ollama.OllamaChatBody,
            b'{"model": "m", "options": {"mirostat": 2}}',
            OLLAMA_ERRORS.body,
        ),
        (
            "llama-server.md",
            llama.LlamaCompletionBody,
            b'{"prompt": "a", "mirostat": 2}',
            LLAMA_ERRORS.body,
        ),
    ]
    for name, body, text, written in said:
        (example,) = json_examples(page(name))
        with pytest.raises(InvalidRequest) as caught:
            parse_body(body, text)
        assert json.loads(written(caught.value)) == example
