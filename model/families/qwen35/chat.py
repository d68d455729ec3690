"""The turns of Qwen3.5 (ChatML) where a checkpoint's files have no template of their own.

The model thinks where the prompt ends in ``<think>``, and does not where it ends with an empty
thought. Published sizes differ in which of the two is the default, and say so in their templates;
here it is not to think. Thoughts of earlier turns are dropped. Tools are shown as JSON and called
by `call_forms.PARAMETERS`, and results are a turn of the user's.
"""

from __future__ import annotations

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer

END_OF_TURN = "<|im_end|>"

TEMPLATE = """\
{%- set given = messages and messages[0].role == 'system' %}
{%- set told = messages[0].content | trim if given else '' %}
{%- if tools or told %}
{{- '<|im_start|>system\\n' + told }}
{%- if tools %}
{{- '\\n\\n' if told }}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + tool | tojson }}
{%- endfor %}
{{- '\\n</tools>\\n\\nTo call a function, answer in this form and with nothing behind it:' }}
{{- '\\n\\n<tool_call>\\n<function=NAME>\\n<parameter=PARAMETER>\\nVALUE\\n</parameter>' }}
{{- '\\n</function>\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if given else messages) %}
{%- set text = message.content or '' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- else %}
{%- if message.role == 'assistant' %}
{%- set text = text.split('</think>') | last %}
{%- endif %}
{%- set text = text | trim %}
{{- '<|im_start|>' + message.role + '\\n' + text }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if text or not loop.first }}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- set given = call.function.arguments %}
{%- for name, value in (given | items if given is mapping else []) %}
{{- '<parameter=' + name + '>\\n' }}
{{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- set thinks = enable_thinking is defined and enable_thinking %}
{{- '<think>\\n' if thinks else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""


def qwen35_chat(tokenizer: Tokenizer, found: ChatTemplate | None) -> ChatTemplate | None:
    """The chat of a checkpoint without a template whose vocabulary has ChatML's tokens."""
    if found is not None or END_OF_TURN not in tokenizer.special_ids:
        return None
    return ChatTemplate(TEMPLATE)
