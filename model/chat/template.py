"""A checkpoint's chat template: text in Jinja's language, read here and run elsewhere.

It is looked for where Hugging Face's tools write it: in ``chat_template.jinja``,
else in ``tokenizer_config.json``, as one text or as a list of named ones. Running
it is the task of `server.chat.renderer`: a template is code from a checkpoint. What it
does not describe of a chat is in `model.chat.turns`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.chat.call_forms import CallForm, form_in
from model.chat.turns import Thinking, Turns, thinking_in
from model.files import ConfigError, read_json, read_text

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
