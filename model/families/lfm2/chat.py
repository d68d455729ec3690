"""The turns of LFM2 (ChatML behind a start token) where a checkpoint's files have no template.

Tools are shown in a list of JSON, as LFM2.5 was taught it; calls are a list in Python's syntax,
which the server writes into the content of a turn.
"""

from __future__ import annotations

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer

START, END_OF_TURN = "<|startoftext|>", "<|im_end|>"

TEMPLATE = """\
{{- bos_token }}
{%- set given = messages and messages[0].role == 'system' %}
{%- set told = messages[0].content if given else '' %}
{%- if tools or told %}
{{- '<|im_start|>system\\n' + told }}
{%- if tools %}
{{- ('\\n' if told else '') + 'List of tools: [' }}
{%- for tool in tools %}
{{- tool | tojson + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if given else messages) %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""


def lfm2_chat(tokenizer: Tokenizer, found: ChatTemplate | None) -> ChatTemplate | None:
    """The chat of a checkpoint without a template whose vocabulary has the family's tokens."""
    if found is not None or not {START, END_OF_TURN} <= tokenizer.special_ids.keys():
        return None
    return ChatTemplate(TEMPLATE, special_tokens={"bos_token": START})
