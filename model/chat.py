"""Messages of a chat as a model reads and writes them: templates, turns, thinking, calls.

A checkpoint's template is text in Jinja's language, read here and run elsewhere. It is looked for
where Hugging Face's tools write it: in ``chat_template.jinja``, else in ``tokenizer_config.json``,
as one text or as a list of named ones. Running it is the task of `server.chat.renderer`: a template
is code from a checkpoint. `Turns` has what it leaves unsaid: texts that end a model's turns, and
how it thinks.

Calls of functions are written as templates show them (`CallForm`): arguments are JSON of the
function's own schema, on one line, or one parameter after another, or those of a call in Python's
syntax. A form is used three times: by the template that tells the model of it, by the grammar that
a call is written under, and by what reads calls from an answer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from model.files import ConfigError, read_json, read_text


@dataclass(frozen=True)
class ParameterForm:
    """An argument is ``begin``, its parameter's name, ``middle``, a line break, the value, ``end``.

    The value is plain text without ``end`` in it, or JSON on one line. An empty text may leave out
    the line break before it.
    """

    begin: str
    middle: str
    end: str


@dataclass(frozen=True)
class CallForm:
    """A call is ``begin``, the name, ``middle``, the arguments and ``end``.

    An answer that begins with ``marker`` is one or more calls: ``opening``, calls with ``between``
    between them, ``closing``. ``name`` is that in `FORMS`, which is kept with what is stored.

    The arguments are JSON, and ``end`` begins with a bracket, or each is written as ``parameter``
    says. ``texts`` are then the names of each function's parameters whose values are plain text.
    With ``is_python`` they are keyword arguments with Python's literals, up to the bracket that is
    ``end``.
    """

    name: str
    marker: str
    begin: str
    middle: str
    end: str
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    is_python: bool = False
    parameter: ParameterForm | None = None
    texts: Mapping[str, Set[str]] = field(default_factory=dict)


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
#: As Qwen3.5 and Qwen3-Coder were taught it.
PARAMETERS = CallForm(
    "tool_call_parameters",
    marker="<tool_call>",
    begin="<tool_call>\n<function=",
    middle=">\n",
    end="</function>\n</tool_call>",
    parameter=ParameterForm("<parameter=", ">", "\n</parameter>\n"),
)
#: As LFM2 was taught it. Its vocabulary has tokens for both ends of the list.
LISTED = CallForm(
    "python_list",
    marker="<|tool_call_start|>",
    begin="",
    middle="(",
    end=")",
    opening="<|tool_call_start|>[",
    between=", ",
    closing="]<|tool_call_end|>",
    is_python=True,
)
#: As Nemotron-Nano-v2 was taught it. Its vocabulary may have tokens for both ends of the list.
JSON_LIST = CallForm(
    "json_list",
    marker="<TOOLCALL>",
    begin='{"name": "',
    middle='", "arguments": ',
    end="}",
    opening="<TOOLCALL>[",
    between=", ",
    closing="]</TOOLCALL>",
)
FORMS = {form.name: form for form in (TAGGED, FENCED, PARAMETERS, LISTED, JSON_LIST)}
#: In templates that teach calls with a function's name in a tag. Of those only one form is known.
_NAME_IN_TAG = "<function="
_PARAMETERS = re.compile(r"<tool_call>(\n|\\n)<function=[^>]*>\1<parameter=[^>]*>\1")

#: How templates of LFM2 and LFM2.5 show the tools. Most of them say nothing of calls.
_LIST_OF_TOOLS = re.compile(r"List of tools: (<\|tool_list_start\|>)?\[")


def form_in(template: str) -> CallForm | None:
    """The form that a template which shows the model its tools writes calls in, if it is known."""
    if "tools" not in template:
        return None
    if _LIST_OF_TOOLS.search(template):
        return LISTED
    if "arguments" not in template:
        return None
    if _NAME_IN_TAG in template:
        return PARAMETERS if _PARAMETERS.search(template) else None
    if JSON_LIST.opening in template:
        return JSON_LIST
    return next((form for form in (TAGGED, FENCED) if form.marker in template), None)


def written(calls: Iterable[Mapping[str, Any]]) -> str:
    """``calls``, as templates read them, in one list of Python's syntax (`LISTED`).

    Arguments that are no object stay as text.
    """
    each = (_call(call["function"]) for call in calls)
    return LISTED.opening + LISTED.between.join(each) + LISTED.closing


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={literal(value)}" for name, value in arguments.items())
    return f"{function['name']}({arguments})"


def literal(value: object) -> str:
    """Python's literal of ``value``, parsed from JSON; a text as JSON has it."""
    match value:
        case None | True | False:
            return repr(value)
        case dict():
            pairs = (f"{literal(name)}: {literal(item)}" for name, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case _:
            return json.dumps(value, ensure_ascii=False)


_OPENING = re.compile(r"\{[{%]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class Switch:
    """A template's variable that turns thinking on and off, and its values for that."""

    name: str
    on: bool | str = True
    off: bool | str = False


#: Those of published templates; a request may use any of the names for any template.
SWITCHES = (
    Switch("enable_thinking"),
    Switch("thinking"),
    Switch("rwkv_generation_prompt", "open_think", "fake_think"),
)


@dataclass(frozen=True)
class Thinking:
    """Text before an answer, between the markers ``begin`` and ``end``.

    ``close`` is what a model writes to end its thinking, and what stands between that and the
    answer. The template's variables ``switches`` turn it on and off; its variable
    ``reasoning_effort`` takes the words ``efforts``, none where it has no levels. ``default`` is
    for requests that do not say; None leaves it to the template.
    """

    begin: str = "<think>"
    end: str = "</think>"
    close: str = "\n</think>\n\n"
    switches: tuple[Switch, ...] = SWITCHES[:1]
    efforts: tuple[str, ...] = ()
    default: bool | None = None

    @property
    def gap(self) -> str:
        """What stands between the end marker and the answer."""
        return self.close.partition(self.end)[2]

    def prompted(self, prompt: str) -> tuple[Literal["", "open", "closed"], str]:
        """Which markers ``prompt`` ends with, and what the last one lacks, if anything.

        Templates may leave a marker's last character to the model: tokenizers join it with what
        follows.
        """
        text = prompt.rstrip()
        for marker, found in ((self.end, "closed"), (self.begin, "open")):
            for lead in ("", marker[-1]):
                if text.endswith(marker.removesuffix(lead)):
                    return ("closed" if found == "closed" else "open"), lead
        return "", ""


@dataclass(frozen=True)
class Turns:
    """How a model's turns end other than by tokens, and how it thinks.

    Texts of ``ends`` end an answer and the thinking before it. ``space`` is what the model writes
    between a prompt that ends in a word and its answer. ``calls`` is the form of a call that is
    forced where the template has none.
    """

    ends: tuple[str, ...] = ()
    thinking: Thinking | None = None
    space: str = ""
    calls: CallForm = TAGGED


def thinking_in(template: str) -> Thinking | None:
    """How a model thinks by its checkpoint's ``template``; None where it does not."""
    # A template may leave the marker's last character to the model.
    if Thinking.end[:-1] not in template:
        return None
    efforts = ("low", "medium", "high") if "reasoning_effort" in template else ()
    switches = tuple(switch for switch in SWITCHES if _reads(template, switch.name))
    return Thinking(switches=switches, efforts=efforts)


def _reads(template: str, name: str) -> bool:
    """Whether ``template`` uses the variable before it gives it a value of its own."""
    found = re.compile(rf"(?<![\w.]){name}(?!\w)")
    keyword = re.compile(rf"(?<=[(,])\s*{name}\s*=(?!=)")  # of a call, as in `namespace`
    for code in _code(template):
        code = keyword.sub("", code)
        first, *others = [*found.finditer(code), None]
        if first is not None:
            is_set = code[: first.start()].split()[-1:] == ["set"]
            return not is_set or others[0] is not None
    return False


def _code(template: str) -> Iterator[str]:
    """What is between a template's braces, without its texts in quotes."""
    start = 0
    while (opening := _OPENING.search(template, start)) is not None:
        end = template.find("}}" if opening[0] == "{{" else "%}", opening.end())
        if end < 0:
            return
        yield _QUOTED.sub("''", template[opening.end() : end])
        start = end + 2


JINJA, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
FILES = (JINJA, TOKENIZER_CONFIG)

MAX_CHARS = 1 << 20

#: Names of ``tokenizer_config.json`` that a template may use.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

PLAIN = """\
{{- bos_token }}
{%- if tools %}
{{- 'To use one of the tools below, answer with <tool_call>\\n{"name": NAME, ' }}
{{- '"arguments": OBJECT}\\n</tool_call>.\\n\\n' }}
{%- for tool in tools %}
{{- tool.function | tojson + '\\n\\n' }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- set more = not loop.last or add_generation_prompt %}
{%- if message.content %}
{{- message.content | trim }}
{{- '\\n\\n' if more or message.tool_calls }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{{- '\\n\\n' if more or not loop.last }}
{%- endfor %}
{%- endfor %}
"""
"""The template of a checkpoint that has none: each message is a paragraph, and so is the answer."""


@dataclass(frozen=True)
class ChatTemplate:
    """``source`` in Jinja's language; ``tool_use`` instead, where given, if there are tools.

    ``special_tokens`` are variables of both: ``bos_token`` and others. ``turns`` is what the
    text does not say.
    """

    source: str = PLAIN
    tool_use: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)

    @property
    def thinking(self) -> Thinking | None:
        """How the model thinks; None where it does not."""
        return self.turns.thinking or thinking_in(self.source)

    @property
    def calls(self) -> CallForm | None:
        """How the model is told to call functions; None where it is not, or in an unknown form."""
        return form_in(self.of(with_tools=True))

    def of(self, with_tools: bool) -> str:
        """The text that is to be rendered."""
        return self.tool_use if with_tools and self.tool_use is not None else self.source


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template in ``folder``, if it has one. Raises `ConfigError`."""
    settings = {}
    if os.path.lexists(folder / TOKENIZER_CONFIG):
        settings = read_json(folder / TOKENIZER_CONFIG)
    found: Any = _file(folder / JINJA)
    where = JINJA
    if not found:
        found, where = settings.get("chat_template"), TOKENIZER_CONFIG
    if found is None:
        return None
    templates = {"default": found} if isinstance(found, str) else _named(found)
    if "default" not in templates:
        raise ConfigError(f"{TOKENIZER_CONFIG}: chat_template has none that is named 'default'")
    for name, template in templates.items():
        checked_template(f"{where}: chat_template {name!r}", template)
    tokens = {name: _token(name, settings.get(name)) for name in SPECIAL_TOKENS}
    return ChatTemplate(
        templates["default"],
        templates.get("tool_use"),
        {name: token for name, token in tokens.items() if token is not None},
    )


def save_chat_template(folder: Path, template: ChatTemplate) -> None:
    """Writes ``template`` as `read_chat_template` finds it. Raises OSError."""
    found: Any = template.source
    if template.tool_use is not None:
        texts = {"default": template.source, "tool_use": template.tool_use}
        found = [{"name": name, "template": text} for name, text in texts.items()]
    values = json.dumps({"chat_template": found, **template.special_tokens}, indent=2)
    (folder / TOKENIZER_CONFIG).write_text(values + "\n", encoding="utf-8")
    (folder / JINJA).unlink(missing_ok=True)  # it would come first


def checked_template(name: str, template: object) -> str:
    """``template``, called ``name`` in errors. Raises `ConfigError` where it cannot be one."""
    if not isinstance(template, str):
        raise ConfigError(f"{name} must be a text")
    if len(template) > MAX_CHARS:
        raise ConfigError(f"{name} has more than {MAX_CHARS} characters")
    return template


def _file(path: Path) -> str | None:
    try:
        return read_text(path, 4 * MAX_CHARS) if os.path.lexists(path) else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def _named(value: object) -> dict[str, str]:
    """The templates of a list of ``{"name", "template"}``."""
    templates: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        name = entry.get("name") if isinstance(entry, dict) else None
        template = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(template, str):
            raise ConfigError(
                f"{TOKENIZER_CONFIG}: chat_template must be a text or a list of name and template"
            )
        templates[name] = template
    return templates


def _token(name: str, value: object) -> str | None:
    """A special token: its name, or an object with it, or null."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{TOKENIZER_CONFIG}: {name} must be a text")
    return value
