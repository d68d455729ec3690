"""A model that thinks, over the fake engine: the turns of RWKV-7 World, and what it says."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from model.chat import ChatTemplate
from model.families.rwkv7.chat import TEMPLATE, TURNS
from server.constraints.compiler import FormatCompiler
from tests.fakes import FakeEngine, told_after
from tests.server.harness import Running, running

WORLD = ChatTemplate(TEMPLATE, special_tokens={"bos_token": "<|endoftext|>"}, turns=TURNS)

#: The prompt of a question: the start token is one, and so is each letter.
ASKED = "User: hi\n\nAssistant:"
ON, OFF = " <think", " <think>\n</think"

SAID = ">\nLet me see.\n</think>\nHello, you!\n\n- one\n\n- two\n\nUser: and"
THOUGHT, ANSWER = "Let me see.", "Hello, you!\n\n- one\n\n- two"
#: What the model has written when it ends: a token for each letter.
NUM_SAID = len(SAID.removesuffix(" and"))
NUM_THOUGHT = len(">\nLet me see.\n</think>")


def thinking_server(
    text: str = SAID, after: str = ASKED + ON, **settings: Any
) -> AbstractAsyncContextManager[Running]:
    """A server whose model says ``text`` after the prompt ``after``, with the seed 0."""
    template = settings.pop("chat_template", WORLD)
    constraints: FormatCompiler | None = settings.get("constraints")
    matchers = None if constraints is None else constraints.matcher
    engine = FakeEngine(story=told_after(1 + len(after), text), matchers=matchers)
    return running(engine, chat_template=template, **settings)
