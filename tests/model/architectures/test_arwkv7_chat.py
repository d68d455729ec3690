"""The turns of ARWKV without a template of its own: those of Qwen2.5, byte for byte."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from model.chat import PLAIN, TAGGED, ChatTemplate
from model.checkpoint import chat_of
from model.families.rwkv7.chat import CHAT_ML
from model.tokenizer import Tokenizer
from server.chat.sandbox import render
from tests.arwkv7 import SHAPES
from tests.tiny import tiny_tokenizer

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL: dict[str, Any] = {"function": {"name": "f", "arguments": {"a": 1}}}
CONFIG = SHAPES["plain"].config
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def written(*messages: dict[str, Any], **variables: Any) -> str:
    given = {"messages": messages, "add_generation_prompt": True, **variables}
    return render(CHAT_ML, given, 100_000, 0.0)


def with_chatml() -> Tokenizer:
    backend = Backend.from_str(tiny_tokenizer().content)
    backend.add_tokens([AddedToken(f"<|im_{end}|>", special=True) for end in ("start", "end")])
    return Tokenizer.from_json(backend.to_str())


def test_turns_begin_and_end_with_their_tokens() -> None:
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert written(HI) == SYSTEM + asked
    brief = {"role": "system", "content": "Be brief."}
    assert written(brief, HI) == "<|im_start|>system\nBe brief.<|im_end|>\n" + asked
    said = {"role": "assistant", "content": "Hello!"}
    assert written(HI, said, HI) == SYSTEM + asked + "Hello!<|im_end|>\n" + asked


def test_calls_and_their_results_are_json_in_tags() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    text = written(HI, asked, *results).removeprefix(written(HI).removesuffix("\n"))
    assert text == (
        f"\n{call}\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>"
        "\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_told_in_the_system_turn() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    text = written(HI, tools=[tool])
    assert text.startswith(SYSTEM.removesuffix("<|im_end|>\n") + "\n\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text
    assert text.endswith("</tool_call><|im_end|>\n" + written(HI).removeprefix(SYSTEM))


def test_only_a_checkpoint_without_a_template_gets_it() -> None:
    template = chat_of(CONFIG, with_chatml(), None)
    assert (template.source, template.calls) == (CHAT_ML, TAGGED)
    assert chat_of(CONFIG, tiny_tokenizer(), None).source == PLAIN
    own = ChatTemplate("{{ messages }}")
    assert chat_of(CONFIG, with_chatml(), own) == own
