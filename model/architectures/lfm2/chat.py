"""The turns of LFM2 (ChatML behind a start token) where a checkpoint's files have no template.

It shows no tools: LFM2 writes calls as lists in Python's syntax.
"""

from __future__ import annotations

from model.chat.template import ChatTemplate
from model.tokenizer import Tokenizer

START, END_OF_TURN = "<|startoftext|>", "<|im_end|>"

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""


def lfm2_chat(tokenizer: Tokenizer, found: ChatTemplate | None) -> ChatTemplate | None:
    """The chat of a checkpoint without a template whose vocabulary has the family's tokens."""
    if found is not None or not {START, END_OF_TURN} <= tokenizer.special_ids.keys():
        return None
    return ChatTemplate(TEMPLATE, special_tokens={"bos_token": START})
