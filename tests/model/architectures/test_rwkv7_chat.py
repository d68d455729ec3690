"""The turns of RWKV World and G1, byte for byte, and which checkpoints have them."""

from __future__ import annotations

from typing import Any

import pytest

from model.chat import FENCED, PLAIN, SWITCHES, TAGGED, ChatTemplate, Switch, Thinking
from model.checkpoint import chat_of
from model.config import ModelConfig
from model.families.rwkv7.chat import NAME, TEMPLATE, TURNS, world_chat
from model.families.rwkv7.config import Rwkv7Config
from model.tokenization.world import WorldCodec
from model.tokenizer import END_OF_TEXT, Tokenizer
from server.chat.sandbox import render
from tests.tiny import tiny_tokenizer

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!"}


def world() -> Tokenizer:
    return Tokenizer(WorldCodec([(id + 1, bytes([id])) for id in range(256)]))


def written(*messages: dict[str, Any], prompt: bool = True, **variables: Any) -> str:
    given = {"messages": messages, "add_generation_prompt": prompt, "bos_token": END_OF_TEXT}
    text = render(TEMPLATE, {**given, **variables}, 100_000, 0.0)
    assert text.startswith(END_OF_TEXT)
    return text.removeprefix(END_OF_TEXT)


def test_turns_have_an_empty_line_between_them() -> None:
    be_brief = {"role": "system", "content": "Be brief."}
    assert written(HI) == "User: Hi\n\nAssistant:"
    assert written(be_brief, HI, HELLO, HI) == (
        "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello!\n\nUser: Hi\n\nAssistant:"
    )
    assert written(HI, HELLO, prompt=False) == "User: Hi\n\nAssistant: Hello!"


@pytest.mark.parametrize("role", ["User", "System"])
def test_question_has_no_empty_line_in_it(role: str) -> None:
    for text in ("a\n\nb", "  a\n\n\nb \n", "a\r\n\r\nb", "\n\na\nb"):
        message = {"role": role.lower(), "content": text}
        assert written(message) == f"{role}: a\nb\n\nAssistant:"


@pytest.mark.parametrize(
    "text", ["One.\n\nTwo.", "```\na\n\n\n  b\r\n```", "Spaces ", "a </think> b", "a\n \n\tb"]
)
def test_answer_is_written_as_the_model_wrote_it(text: str) -> None:
    said = {**HELLO, "content": text}
    assert written(HI, said, HI) == f"{written(HI)} {text}\n\n{written(HI)}"
    assert written(HI, {**HELLO, "content": text + "\n"}, HI) == written(HI, said, HI)


@pytest.mark.parametrize(
    ("variables", "asked", "prompt"),
    [
        ({"enable_thinking": True}, "Hi", "Assistant: <think"),
        ({"enable_thinking": False}, "Hi", "Assistant: <think>\n</think"),
        (
            {"enable_thinking": True, "reasoning_effort": "low"},
            "Hi (think a bit)",
            "Assistant: <think",
        ),
        (
            {"enable_thinking": True, "reasoning_effort": "medium"},
            "Hi (think)",
            "Assistant: <think",
        ),
        (
            {"enable_thinking": True, "reasoning_effort": "high"},
            "Hi (think a lot)",
            "Assistant: <think",
        ),
    ],
)
def test_thinking_is_asked_for_in_the_last_question(
    variables: dict[str, Any], asked: str, prompt: str
) -> None:
    text = written(HI, HELLO, HI, **variables)
    assert text == f"User: Hi\n\nAssistant: Hello!\n\nUser: {asked}\n\n{prompt}"


def test_past_thinking_is_left_out() -> None:
    thought = {**HELLO, "content": "<think>\nwell\n</think>\nHello!"}
    assert written(HI, thought, HI) == written(HI, HELLO, HI)


LOOK = {"type": "function", "function": {"name": "look", "description": "Looks."}}
CALL = {"function": {"name": "look", "arguments": {"at": "sky"}}}
SHOWN = 'Tools:\n[{"name": "look", "description": "Looks."}]'


def test_tools_stand_in_the_system_turn() -> None:
    be_brief = {"role": "system", "content": "Be\n\nbrief."}
    only = "Return only a JSON function call."
    asked = "User: Hi\n\nAssistant:"
    assert written(HI, tools=[LOOK]) == f"System: {SHOWN}\n\n{asked}"
    assert written(be_brief, HI, tools=[LOOK]) == f"System: Be\nbrief.\n{SHOWN}\n\n{asked}"
    forced = written(HI, tools=[LOOK], tool_choice="required", reasoning_effort="low")
    assert forced == f"System: {SHOWN}\n{only}\n\nUser: Hi (think a bit)\n\nAssistant:"


def test_calls_are_fenced_and_results_are_the_users() -> None:
    asked = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    said = {"role": "assistant", "content": "I look.\n\nNow.", "tool_calls": [CALL]}
    gave = {"role": "tool", "content": "blue\r\n\r\nand red"}
    called = '```json\n{"name": "look", "arguments": {"at": "sky"}}\n```'
    result = "User: Function output:\nblue\nand red"
    text = written(HI, asked, gave, said, gave)
    assert text == (
        f"User: Hi\n\nAssistant: {called}\n{called}\n\n{result}\n\n"
        f"Assistant: I look.\n\nNow.\n{called}\n\n{result}\n\nAssistant:"
    )


def test_template_without_tools_has_those_of_the_family() -> None:
    own = "{{ thinking }}</think>"
    chat = chat_of(rwkv7(), world(), ChatTemplate(own))
    assert (chat.source, chat.tool_use, chat.calls) == (own, TEMPLATE, FENCED)
    assert chat.thinking is not None and chat.thinking.switches == (THINK, ENABLE)
    tagged = chat_of(rwkv7(), world(), ChatTemplate("{{ tools }}<tool_call> arguments"))
    assert (tagged.tool_use, tagged.calls) == (None, TAGGED)
    silent = chat_of(rwkv7(), world(), ChatTemplate("{{ tools }}"))
    assert (silent.calls, silent.turns.calls) == (None, FENCED)


def test_prompt_shows_which_markers_it_ends_with() -> None:
    thinking = Thinking()
    for text, found in (
        ("Assistant: <think", ("open", ">")),
        ("Assistant: <think>\n</think", ("closed", ">")),
        ("Assistant: <think></think", ("closed", ">")),
        ("Assistant: <think></think>\n", ("closed", "")),
        ("Bot✿<think>", ("open", "")),
        ("<|im_start|>assistant\n<think>\n", ("open", "")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ("closed", "")),
        ("Assistant:", ("", "")),
    ):
        assert thinking.prompted(text) == found


def rwkv7() -> Rwkv7Config:
    return Rwkv7Config(vocab_size=300, hidden_size=32, num_hidden_layers=1, head_dim=16)


def test_world_vocabulary_has_these_turns() -> None:
    for found in (None, ChatTemplate(NAME)):
        chat = chat_of(rwkv7(), world(), found)
        assert (chat.source, chat.turns) == (TEMPLATE, TURNS)
        assert chat.special_tokens["bos_token"] == END_OF_TEXT


def test_template_of_the_checkpoint_comes_first_and_its_turns_end_the_same() -> None:
    own = ChatTemplate("{{ x }} <think></think>", special_tokens={"bos_token": "<s>"})
    chat = chat_of(rwkv7(), world(), own)
    assert chat.source == own.source
    assert chat.turns.ends == TURNS.ends
    assert chat.special_tokens["bos_token"] == END_OF_TEXT
    assert chat.thinking == Thinking(close="\n</think>\n", switches=(), default=False)
    assert chat_of(rwkv7(), world(), ChatTemplate("{{ x }}")).thinking is None


@pytest.mark.parametrize(
    ("source", "end"), [("{{ 'User✿' }}", "✿"), ("{{ '### User\n' }}", "\n### User")]
)
def test_turns_of_another_form_end_as_the_template_writes_them(source: str, end: str) -> None:
    chat = chat_of(rwkv7(), world(), ChatTemplate(source))
    assert chat.turns.ends == (*TURNS.ends, end)


def test_other_vocabularies_and_families_have_the_plain_template() -> None:
    assert world_chat(tiny_tokenizer(), None) is None
    assert chat_of(rwkv7(), tiny_tokenizer(), None).source == PLAIN
    assert chat_of(ModelConfig(vocab_size=300), tiny_tokenizer(), None).source == PLAIN


ENABLE, THINK, RWKV = SWITCHES


@pytest.mark.parametrize(
    ("source", "switches"),
    [
        ("", ()),
        ("{% if enable_thinking %}", (ENABLE,)),
        ("enable_thinking", ()),
        ("{{ 'thinking' }}", ()),
        ("{% if message.thinking or message['thinking'] %}", ()),
        ("{% set thinking = message.reasoning_content %}{{ thinking }}", ()),
        ("{%- set thinking = thinking | default(false) %}", (THINK,)),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", (THINK,)),
        ("{{ enable_thinking_now }}{% if rwkv_generation_prompt == 'open_think' %}", (RWKV,)),
        ("{{ enable_thinking or thinking }}", (ENABLE, THINK)),
        ("{{ thinking", ()),
    ],
)
def test_template_shows_what_turns_thinking_on(source: str, switches: tuple[Switch, ...]) -> None:
    for end in ("</think>", "</think"):
        assert ChatTemplate(source + end).thinking == Thinking(switches=switches)


def test_template_shows_whether_a_model_thinks_and_its_levels() -> None:
    assert ChatTemplate("{{ enable_thinking }}").thinking is None
    levels = ChatTemplate("{{ enable_thinking }}{{ reasoning_effort }}</think>").thinking
    assert levels == Thinking(efforts=("low", "medium", "high"))
