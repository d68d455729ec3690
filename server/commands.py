"""Commands that other packages define, imported when they are asked for.

``everstream serve`` must not wait for the imports of ``everstream train``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

#: name -> (module, function); a name of two words is in a group.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "tokenizer": ("model.training.cli", "tokenizer_command"),
    "train": ("model.training.cli", "train_command"),
    "eval": ("model.training.cli", "eval_command"),
    "export": ("model.training.cli", "export_command"),
    "quantize": ("model.quantization.cli", "quantize_command"),
    "convert": ("model.convert.cli", "convert_command"),
    "chat": ("clients.chat.cli", "chat"),
    "bench": ("clients.bench.cli", "bench"),
    "key": ("server.api.keys_cli", "key_command"),
    "store check": ("server.store.cli", "check_command"),
    "store compact": ("server.store.cli", "compact_command"),
    "store export": ("server.store.cli", "export_command"),
}

GROUPS = {"store": "Look after a folder of kept sessions."}


class Commands(TyperGroup):
    """The commands of the app itself, and those of `ELSEWHERE`.

    The types of contexts and commands are click's or typer's own, by typer's version.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        elsewhere = dict.fromkeys(name.partition(" ")[0] for name in ELSEWHERE)
        return [*super().list_commands(ctx), *elsewhere]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        words = {tuple(name.split()): place for name, place in ELSEWHERE.items()}
        found = {name: place for name, place in words.items() if name[0] == cmd_name}
        if not found:
            return super().get_command(ctx, cmd_name)
        about = GROUPS.get(cmd_name)
        app = typer.Typer(
            name=cmd_name, help=about, add_completion=False, pretty_exceptions_enable=False
        )
        for name, (module, function) in found.items():
            app.command(name[-1])(getattr(import_module(module), function))
        return get_command(app)
