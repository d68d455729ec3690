"""Commands that other packages define, imported when they are asked for.

``everstream serve`` must not wait for the imports of ``everstream train``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

#: name -> (module, function).
ELSEWHERE: dict[str, tuple[str, str]] = {
    "tokenizer": ("model.training.cli", "tokenizer_command"),
    "train": ("model.training.cli", "train_command"),
    "eval": ("model.training.cli", "eval_command"),
    "export": ("model.training.cli", "export_command"),
    "quantize": ("model.quantization.cli", "quantize_command"),
    "convert": ("model.convert.cli", "convert_command"),
    "chat": ("clients.cli", "chat"),
}


class Commands(TyperGroup):
    """The commands of the app itself, and those of `ELSEWHERE`.

    The types of contexts and commands are click's or typer's own, by typer's version.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *ELSEWHERE]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, function = ELSEWHERE[cmd_name]
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(cmd_name)(getattr(import_module(module), function))
        return get_command(app)
