"""What comes after an answer, by the chat templates that there are."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer
from server.api.chat.messages import FunctionDefinition, FunctionTool
from server.api.openai.responses.items import Json, Note
from server.api.openai.responses.stored import (
    MAX_BYTES,
    Answer,
    ResponseTurn,
    TurnInput,
    history,
    what_follows,
    whole_prompt,
)
from server.config import ServerConfig
from server.errors import InvalidRequest
from server.models.service import Service, make_service
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.store.sqlite.store import MemoryStore
from tests.fakes import EOS, MODEL, ByteTokenizer, FakeEngine
from tests.server.api.openai.thinking import WORLD
from tests.server.one_model import SIGNING

pytestmark = pytest.mark.process

#: As ChatML: a turn ends as the model ends it.
ENDED = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }}<|endoftext|>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

#: The answer begins with a thought, which is left out later.
THINKING = ENDED.replace("<assistant>{% endif", "<assistant><think>{% endif")

#: Instructions and tools stand before the last question.
LATE = """\
{%- for message in messages %}
{%- if loop.last %}{{ tools }}{% endif %}<{{ message.role }}>{{ message.content }}
{%- endfor %}<assistant>"""

STRICT = ENDED + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"

ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "more"}]},
]
ASK = TurnInput(ITEMS, None, ())


@pytest.fixture
async def services() -> AsyncIterator[dict[str, Service]]:
    async_engine = AsyncEngine(FakeEngine(), time.monotonic, Metrics(), MemoryStore())
    tokenizer = cast(Tokenizer, ByteTokenizer())
    made = {
        name: make_service(
            async_engine,
            tokenizer,
            MODEL,
            ServerConfig(),
            SIGNING,
            chat_template=ChatTemplate(source),
        )
        for name, source in {
            "ended": ENDED,
            "thinking": THINKING,
            "late": LATE,
            "strict": STRICT,
        }.items()
    }
    made["world"] = replace(made["ended"], chat_template=WORLD)
    yield made
    for service in made.values():
        await service.renderer.close()


async def test_end_of_the_answer_comes_before_what_is_new(services: dict[str, Service]) -> None:
    following = await what_follows(services["ended"], ASK, Answer([ord(".")]))
    assert following is not None
    assert following.ids == [EOS, *b"<user>more", EOS, *b"<assistant>"]


async def test_end_that_the_model_has_written_does_not_come_again(
    services: dict[str, Service],
) -> None:
    following = await what_follows(services["ended"], ASK, Answer([EOS]))
    assert following is not None
    assert following.ids == [*b"<user>more", EOS, *b"<assistant>"]


async def test_text_is_that_of_the_whole_conversation(services: dict[str, Service]) -> None:
    said = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    ]
    service = services["ended"]
    whole = await whole_prompt(service, "me", ASK, said)
    begun = await whole_prompt(service, "me", TurnInput(said[:1], None, ()))
    following = await what_follows(service, ASK, Answer([]))
    assert following is not None
    assert whole.ids == [*begun.ids, ord("a"), *following.ids]


@pytest.mark.parametrize("name", ["thinking", "late"])
async def test_template_that_writes_an_answer_otherwise_later_must_read_it_all(
    services: dict[str, Service], name: str
) -> None:
    tool = FunctionTool(type="function", function=FunctionDefinition(name="f"))
    assert await what_follows(services[name], TurnInput(ITEMS, None, (tool,)), Answer([])) is None


async def test_template_that_refuses_a_stand_in_must_read_it_all(
    services: dict[str, Service],
) -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": "o"}
    assert await what_follows(services["strict"], TurnInput([output], None, ()), Answer([])) is None


@pytest.mark.parametrize(
    ("written", "text", "new"),
    [
        (" Hello.", "Hello.", "\n\nUser: more\n\nAssistant:"),
        (" Hello.\n", "Hello.\n", "\nUser: more\n\nAssistant:"),
        (" Hello. ", "Hello. ", None),  # the template cuts a space
        (" Hello.\n\n", "Hello.", "User: more\n\nAssistant:"),
        (" Hello.\n\nUser", "Hello.", ": more\n\nAssistant:"),
        (" Hello.\n\nSo", "Hello.", None),
        ("Hello.\n\n", "Hello.", None),  # the template writes a space
        (" Hello.<end>", "Hello.", None),
    ],
)
async def test_session_continues_if_its_text_is_that_of_the_template(
    services: dict[str, Service], written: str, text: str, new: str | None
) -> None:
    begun, end, _ = written.partition("<end>")
    tokens = [*begun.encode(), *([EOS] if end else [])]
    following = await what_follows(services["world"], ASK, Answer(tokens, text))
    assert (following and bytes(following.ids).decode()) == new


def turn(number: int, text: str) -> ResponseTurn:
    """One of a chain, after the one before it."""
    fields = {"previous_response_id": f"resp_{number - 1}" if number else None}

    async def output() -> list[Json]:
        return []

    return ResponseTurn(Note(f"resp_{number}", fields, [{"text": text}]), output)


async def test_conversation_that_is_too_large_is_not_read_again() -> None:
    async def find(name: str) -> ResponseTurn:
        return turn(int(name.removeprefix("resp_")), "x" * (MAX_BYTES // 8))

    assert len(await history(find, turn(5, ""))) == 6
    with pytest.raises(InvalidRequest, match="has more than 8388608 bytes"):
        await history(find, turn(9, ""))
