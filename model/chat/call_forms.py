"""How models write calls of functions, as their chat templates show it.

Arguments are JSON of the function's own schema, on one line. A form is used three times: by the
template that tells the model of it, by the grammar that a call is written under, and by what reads
calls from an answer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallForm:
    """A call is ``begin``, the name, ``middle``, the arguments and ``end``.

    ``end`` has a line break in it, which JSON on one line cannot have. An answer that begins with
    ``marker`` is a call. ``name`` is that in `FORMS`, which is kept with what is stored.
    """

    name: str
    marker: str
    begin: str
    middle: str
    end: str
    between: str = "\n"


#: As Hermes, Qwen and others were taught it.
TAGGED = CallForm(
    "tool_call",
    marker="<tool_call>",
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
)
#: As RWKV-7 G1 was taught it.
FENCED = CallForm(
    "json_fence",
    marker="```json",
    begin='```json\n{"name": "',
    middle='", "arguments": ',
    end="}\n```",
)
FORMS = {form.name: form for form in (TAGGED, FENCED)}
#: In templates that teach calls whose arguments are not JSON, as those of Qwen3.5 do.
_NOT_JSON = "<function="


def form_in(template: str) -> CallForm | None:
    """The form that a template which shows the model its tools writes calls in, if it is known."""
    if "tools" not in template or "arguments" not in template or _NOT_JSON in template:
        return None
    return next((form for form in FORMS.values() if form.marker in template), None)
