"""Chat templates like those of published RWKV-7 files, written from the descriptions of these."""

from __future__ import annotations

#: As the official folders of 2026: tools in the System turn, calls in a fence, `thinking`.
OFFICIAL = """\
{%- set thinking = thinking | default(false) %}
{%- set told = namespace(text='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- set told.text = message.content | trim %}
{%- endif %}
{%- endfor %}
{%- if told.text or tools %}
{{- 'System:' }}
{{- ' ' + told.text if told.text }}
{%- if tools %}
{{- (' ' if not told.text else '\\n') + 'Tools:\\n' + tools | tojson }}
{%- endif %}
{{- '\\n\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- 'User: ' + message.content | trim + '\\n\\n' }}
{%- elif message.role == 'tool' %}
{{- 'User: Function output:\\n' + message.content | trim + '\\n\\n' }}
{%- elif message.role == 'assistant' %}
{{- 'Assistant: ' }}
{%- generation %}
{{- message.content | trim }}
{%- for call in message.tool_calls or [] %}
{{- '```json\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n```' }}
{%- endfor %}
{%- endgeneration %}
{{- '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant: <think' if thinking else 'Assistant: <think></think>\\n' }}
{%- endif %}
"""

#: As the folders for transformers-rwkv: `rwkv_generation_prompt`, and markers without their ends.
SWITCHED = """\
{%- set form = rwkv_prompt_template | default('bot') %}
{%- set names = {'user': 'User', 'assistant': 'Bot' if form == 'bot' else 'Assistant'} %}
{%- for message in messages %}
{%- if form == 'bot' %}
{{- names[message.role] + '✿' + message.content + '✿' }}
{%- else %}
{{- names[message.role] + ': ' + message.content + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- names.assistant + ('✿' if form == 'bot' else ': ') }}
{%- if rwkv_generation_prompt | default('open_think') == 'open_think' %}
{{- '<think' }}
{%- elif rwkv_generation_prompt == 'fake_think' %}
{{- '<think></think' }}
{%- endif %}
{%- endif %}
"""

#: As the converter of llama.cpp writes into GGUF files: it thinks unless it is told not to.
CONVERTED = """\
{{- bos_token }}
{%- for message in messages %}
{%- set text = message.content %}
{%- if message.role == 'user' %}
{{- 'User: ' + text | trim + '\\n\\n' }}
{%- elif message.role == 'system' %}
{{- 'System: ' + text | trim + '\\n\\n' }}
{%- else %}
{{- 'Assistant: ' + text.split('</think>')[-1] | trim + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- ' <think>\\n</think>' }}
{%- else %}
{{- ' <think>' }}
{%- endif %}
{%- endif %}
"""

PUBLISHED = {"official": OFFICIAL, "switched": SWITCHED, "converted": CONVERTED}
