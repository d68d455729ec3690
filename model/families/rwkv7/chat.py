"""The turns of RWKV World and G1: `System:`, `User:` and `Assistant:`, an empty line between them.

From the model cards and `RWKV7-G1x-templates.txt` of https://github.com/BlinkDL/RWKV-LM (RWKV-v7).
An answer may have empty lines: it ends where the next turn begins. The other messages are written
without any, as in training. G1 thinks where the prompt ends in `` <think``, and does not where it
ends in `` <think>\\n</think``; the marker's ``>`` is left to the model, whose tokenizer joins it
with what follows. How long it thinks can be asked for behind the user's last words. In a history
there are no thoughts, and answers are as the model wrote them.

ARWKV has other turns: ChatML (`qwen_chat`).
"""

from __future__ import annotations

from dataclasses import replace

from model.chat import FENCED, ChatTemplate, Thinking, Turns, thinking_in
from model.tokenization import world
from model.tokenization.base import END_OF_TEXT
from model.tokenizer import Tokenizer

#: What GGUF files have in the place of a template.
NAME = "rwkv-world"

#: A model thinks where it is asked to, in any format of its file and with any template.
USUAL = Thinking(close="\n</think>\n", default=False)
THINKING = replace(USUAL, efforts=("minimal", "low", "medium", "high"))
#: The longer one first takes the empty line out of the answer.
ENDS = ("\n\nUser:", "\nUser:")
TURNS = Turns(ENDS, THINKING, space=" ", calls=FENCED)

#: Ends of turns in other forms that published templates offer, by what shows that they do.
OTHER_ENDS = {"✿": "✿", "### User": "\n### User"}

#: What a text begins with is the token that ends one.
SPECIAL_TOKENS = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}

TEMPLATE = """\
{%- set efforts = {'minimal': ' (think a bit)', 'low': ' (think a bit)', 'medium': ' (think)',
                   'high': ' (think a lot)'} %}
{%- set names = {'system': 'System', 'assistant': 'Assistant'} %}
{%- set told, rest, last = '', messages, namespace(user=-1) %}
{%- if tools and messages and messages[0].role == 'system' %}
{%- set told, rest = messages[0].content, messages[1:] %}
{%- endif %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- set last.user = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- macro clean(text) %}
{{- text.replace('\\r\\n', '\\n').split('\\n') | select | join('\\n') | trim }}
{%- endmacro %}
{%- macro said(text) %}
{%- if text.lstrip().startswith('<think') and '</think>' in text %}
{%- set text = text.split('</think>', 1)[1] %}
{%- endif %}
{{- text.lstrip().rstrip('\\n') }}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
{{- 'System: ' + (clean(told) + '\\n' if told else '') + 'Tools:\\n' }}
{{- tools | map(attribute='function') | list | tojson }}
{{- '\\nReturn only a JSON function call.' if tool_choice == 'required' }}
{{- '\\n\\n' }}
{%- endif %}
{%- for message in rest %}
{%- set text = message.content or '' %}
{%- set text = said(text) if message.role == 'assistant' else clean(text) %}
{{- names.get(message.role, 'User') + ':' }}
{{- ' Function output:\\n' + text if message.role == 'tool' else ' ' + text if text }}
{%- for call in message.tool_calls or [] %}
{{- ('\\n' if text or not loop.first else ' ') + '```json\\n{"name": "' }}
{{- call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n```' }}
{%- endfor %}
{%- if loop.index0 == last.user and reasoning_effort is defined %}
{{- efforts[reasoning_effort] }}
{%- endif %}
{{- '\\n\\n' if not loop.last or add_generation_prompt }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:' }}
{%- if enable_thinking is defined and enable_thinking is not none %}
{{- ' <think' if enable_thinking else ' <think>\\n</think' }}
{%- endif %}
{%- endif %}
"""


def world_chat(tokenizer: Tokenizer, found: ChatTemplate | None) -> ChatTemplate | None:
    """The chat of a checkpoint with the World tokenizer, or whose template is `NAME`; else None.

    ``found`` is its own template, whose turns end as all of this vocabulary do.
    """
    is_named = found is not None and found.source.strip() == NAME
    if tokenizer.file_name != world.FILE:
        return replace(found, source=TEMPLATE, turns=TURNS) if found and is_named else None
    if found is None or is_named:
        return ChatTemplate(TEMPLATE, special_tokens=SPECIAL_TOKENS, turns=TURNS)
    shown = (end for sign, end in OTHER_ENDS.items() if sign in found.source)
    own = {n: t for n, t in found.special_tokens.items() if t in tokenizer.special_ids}
    if (thinking := thinking_in(found.source)) is not None:
        thinking = replace(USUAL, switches=thinking.switches, efforts=thinking.efforts)
    tool_use = found.tool_use
    if tool_use is None and "tools" not in found.source:
        tool_use = TEMPLATE
    if thinking is not None and thinking.switches and tool_use == TEMPLATE:
        switches = dict.fromkeys((*thinking.switches, *USUAL.switches))
        thinking = replace(thinking, switches=tuple(switches))
    turns = replace(TURNS, ends=(*ENDS, *shown), thinking=thinking)
    tokens = {**SPECIAL_TOKENS, **own}
    return replace(found, tool_use=tool_use, special_tokens=tokens, turns=turns)


# -------------------------------------------------------------------------------------------------
# The turns of ARWKV: those of Qwen2.5-Instruct, which it was made from (ChatML). Used where a
# checkpoint's files have no template of their own.


END_OF_TURN = "<|im_end|>"

CHAT_ML = """\
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
    return ChatTemplate(CHAT_ML)
