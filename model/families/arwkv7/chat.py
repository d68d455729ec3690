"""The turns of ARWKV: those of Qwen2.5-Instruct, which it was made from (ChatML).

Used where a checkpoint's files have no template of their own.
"""

from __future__ import annotations

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer

END_OF_TURN = "<|im_end|>"

TEMPLATE = """\
{%- set given = messages and messages[0].role == 'system' %}
{%- set told = messages[0].content if given else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\\n' + told }}
{%- if tools %}
{{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + tool | tojson }}
{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' }}
{{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": ' }}
{{- '<function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in (messages[1:] if given else messages) %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- else %}
{{- '<|im_start|>' + message.role }}
{%- set text = message.content or '' %}
{{- '\\n' + text if text or not message.tool_calls }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""


def qwen_chat(tokenizer: Tokenizer, found: ChatTemplate | None) -> ChatTemplate | None:
    """The chat of a checkpoint without a template whose vocabulary has ChatML's tokens."""
    if found is not None or END_OF_TURN not in tokenizer.special_ids:
        return None
    return ChatTemplate(TEMPLATE)
