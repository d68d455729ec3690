"""The turns of RWKV World and G1: `System:`, `User:` and `Assistant:`, an empty line between them.

From the chat demo and the model cards of https://github.com/BlinkDL/RWKV-LM (RWKV-v7). An empty
line ends a turn, so that messages are written without any. G1 thinks where the prompt ends in
`` <think``, and does not where it ends in `` <think>\\n</think``; the marker's ``>`` is left to
the model, whose tokenizer joins it with what follows. How long it thinks can be asked for behind
the user's last words. In a history there are no thoughts.
"""

from __future__ import annotations

from dataclasses import replace

from model.chat_template import ChatTemplate
from model.chat_turns import Thinking, Turns, thinking_in
from model.tokenization import world
from model.tokenization.base import END_OF_TEXT
from model.tokenizer import Tokenizer

#: What GGUF files have in the place of a template.
NAME = "rwkv-world"

THINKING = Thinking(close="\n</think>\n", efforts=("minimal", "low", "medium", "high"))
TURNS = Turns(ends=("\n\n",), ends_anywhere=("\nUser:",), thinking=THINKING)

#: What a text begins with is the token that ends one.
SPECIAL_TOKENS = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}

TEMPLATE = """\
{%- set efforts = {'minimal': ' (think a bit)', 'low': ' (think a bit)', 'medium': ' (think)',
                   'high': ' (think a lot)'} %}
{%- set names = {'system': 'System', 'assistant': 'Assistant'} %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- set last.user = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- macro line(text) %}
{{- (text | trim).replace('\\r\\n', '\\n').split('\\n') | select | join('\\n') }}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
{{- 'System: To use one of the tools below, answer with <tool_call>\\n{"name": NAME, ' }}
{{- '"arguments": OBJECT}\\n</tool_call>.' }}
{%- for tool in tools %}
{{- '\\n' + tool.function | tojson }}
{%- endfor %}
{{- '\\n\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set text = message.content or '' %}
{%- if message.role == 'assistant' %}
{%- set text = text.split('</think>')[-1] %}
{%- endif %}
{{- names.get(message.role, 'User') + ':' }}
{%- if text | trim %}
{{- ' ' + line(text) }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- ('\\n' if text | trim or not loop.first else ' ') + '<tool_call>\\n{"name": "' }}
{{- call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- if loop.index0 == last.user and reasoning_effort is defined %}
{{- efforts[reasoning_effort] }}
{%- endif %}
{{- '\\n\\n' if not loop.last or add_generation_prompt }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:' }}
{%- if enable_thinking is defined %}
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
    own = {n: t for n, t in found.special_tokens.items() if t in tokenizer.special_ids}
    thinking = thinking_in(found.source)
    turns = replace(TURNS, thinking=thinking and replace(thinking, close="\n</think>\n"))
    return replace(found, special_tokens={**SPECIAL_TOKENS, **own}, turns=turns)
