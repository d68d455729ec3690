"""The turns of Qwen3.5 and LFM2 where a checkpoint has no template, and what theirs say."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from model.chat import JSON_LIST, LISTED, PARAMETERS, PLAIN, TAGGED, ChatTemplate, Switch, form_in
from model.checkpoint import chat_of
from model.families.lfm2.chat import TEMPLATE as LFM2
from model.families.qwen35.chat import TEMPLATE as QWEN35
from model.tokenizer import Tokenizer
from server.chat.sandbox import render
from tests.tiny import tiny_checkpoint, tiny_tokenizer

HI: dict[str, Any] = {"role": "user", "content": " Hi"}
THOUGHT: dict[str, Any] = {"role": "assistant", "content": "<think>\nWell\n</think>\n\nYes"}
CALL: dict[str, Any] = {"function": {"name": "f", "arguments": {"a": 1}}}
ASKED = "<|im_start|>user\nHi<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
#: How the template of Qwen3.5 shows a call.
XML = "{{ tools }}{{ c.arguments }}<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>"


def written(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    given = {"messages": messages, "add_generation_prompt": True, **variables}
    return render(template, given, 100_000, 0.0)


def with_tokens(*names: str) -> Tokenizer:
    backend = Backend.from_str(tiny_tokenizer().content)
    backend.add_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer.from_json(backend.to_str())


def test_qwen35_thinks_where_it_is_asked_to() -> None:
    assert written(QWEN35, HI) == ASKED + ANSWER + NO_THOUGHT
    assert written(QWEN35, HI, enable_thinking=False) == ASKED + ANSWER + NO_THOUGHT
    assert written(QWEN35, HI, enable_thinking=True) == ASKED + ANSWER + "<think>\n"
    thinking = ChatTemplate(QWEN35).thinking
    assert thinking is not None and thinking.switches == (Switch("enable_thinking"),)


def test_qwen35_reads_no_thoughts_of_earlier_turns() -> None:
    system = {"role": "system", "content": "Be brief. "}
    text = written(QWEN35, system, HI, THOUGHT, HI)
    told = "<|im_start|>system\nBe brief.<|im_end|>\n"
    said = ANSWER + "Yes<|im_end|>\n"
    assert text == told + ASKED + said + ASKED + ANSWER + NO_THOUGHT


def test_qwen35_shows_tools_calls_and_results() -> None:
    other = {"function": {"name": "g", "arguments": {"b": "x\n", "c": [None, True]}}}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL, other]}
    results = [{"role": "tool", "content": number} for number in "12"]
    text = written(QWEN35, HI, called, *results, tools=[{"type": "function"}])
    assert '<tools>\n{"type": "function"}\n</tools>' in text
    first = "<parameter=a>\n1\n</parameter>\n"
    rest = "<parameter=b>\nx\n\n</parameter>\n<parameter=c>\n[null, true]\n</parameter>\n"
    calls = [
        f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
        for name, values in (("f", first), ("g", rest))
    ]
    assert "{}{}{}\n{}<|im_end|>\n".format(ASKED, ANSWER, *calls) in text
    shown = "".join(f"\n<tool_response>\n{number}\n</tool_response>" for number in "12")
    assert text.endswith(f"<|im_start|>user{shown}<|im_end|>\n{ANSWER}{NO_THOUGHT}")
    assert ChatTemplate(QWEN35).calls == PARAMETERS


def test_calls_by_parameters_are_told_from_other_forms() -> None:
    """Else a model would be made to write calls that its template does not teach."""
    assert form_in(XML) == PARAMETERS
    assert form_in(XML.replace("\n", "\\n")) == PARAMETERS
    assert form_in(XML.replace("<tool_call>", "<seed:tool_call>")) is None
    assert form_in(XML.replace("<parameter=a>", "{")) is None
    assert form_in(XML.replace("<function=f>", "{")) == TAGGED


def test_nemotron_calls_in_a_list_of_json() -> None:
    template = """{{ tools }}<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>"""
    assert form_in(template) == JSON_LIST
    assert form_in(template.replace("arguments", "parameters")) is None
    assert form_in(template.replace("<TOOLCALL>[", "<TOOLCALL>")) is None


def test_switch_that_a_template_sets_by_itself_is_none() -> None:
    """As that of Nemotron-Nano-v2, which finds in the messages whether to think."""
    own = "{%- set ns = namespace(a=1, enable_thinking = true) -%}{{ ns.enable_thinking }}</think>"
    thinking = ChatTemplate(own).thinking
    assert thinking is not None and thinking.switches == ()
    given = own.replace("= true", "= enable_thinking | default(true)")
    compared = own.replace("a=1,", "enable_thinking == 1,")
    for template in (given, compared):
        thinking = ChatTemplate(template).thinking
        assert thinking is not None and thinking.switches == (Switch("enable_thinking"),)


def test_lfm2_begins_with_its_start_token() -> None:
    text = written(LFM2, {"role": "user", "content": "Hi"}, bos_token="<|startoftext|>")
    assert text == "<|startoftext|>" + ASKED + ANSWER


def test_lfm2_shows_tools_in_a_list() -> None:
    system = {"role": "system", "content": "Be brief."}
    tools = [{"type": "function"}, {"type": "other"}]
    text = written(LFM2, system, HI, tools=tools, bos_token="")
    shown = 'List of tools: [{"type": "function"}, {"type": "other"}]'
    assert text.startswith(f"<|im_start|>system\nBe brief.\n{shown}<|im_end|>\n")
    assert shown in written(LFM2, HI, tools=tools, bos_token="")
    assert ChatTemplate(LFM2).calls == LISTED
    assert form_in(LFM2.replace("List of tools: [", "Tools: [")) is None


@pytest.mark.parametrize(
    ("family", "template", "tokens"),
    [
        ("qwen35", QWEN35, ("<|im_start|>", "<|im_end|>")),
        ("lfm2", LFM2, ("<|startoftext|>", "<|im_start|>", "<|im_end|>")),
    ],
)
def test_only_a_checkpoint_without_a_template_gets_it(
    family: str, template: str, tokens: tuple[str, ...]
) -> None:
    config, tokenizer = tiny_checkpoint(family).config, with_tokens(*tokens)
    assert chat_of(config, tokenizer, None).source == template
    assert chat_of(config, tokenizer, ChatTemplate("own")).source == "own"
    assert chat_of(config, tiny_tokenizer(), None).source == PLAIN
    assert set(tokenizer.eos_token_ids) == {0, tokenizer.special_ids["<|im_end|>"]}
