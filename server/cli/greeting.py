"""What the server prints before it answers: what runs, and how to see it."""

from __future__ import annotations

import contextlib
import json
import logging
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from model.chat.template import PLAIN

if TYPE_CHECKING:
    from server.config.settings import ServerConfig
    from server.models.info import ModelInfo
    from server.models.registry import Models

#: The last thing that is printed before the server answers, so that it stays on the screen.
OPEN_WARNING = """\
****************************************************************************
WARNING: this server has no API key and listens on {host}.
Anyone who reaches this address can use it, and read and delete every session.
Give it a key:       EVERSTREAM_API_KEY=... (or --api-key, --keys-file)
Or keep it private:  --host 127.0.0.1, or a container port published there
****************************************************************************
"""

#: What the bundled models are for, by name; the page of models/bundled says more.
PURPOSES = {
    "smollm2": "chats, from a state that does not grow",
    "everstream-stories": "continues stories and answers no questions",
}
_PAGES = Path(__file__).parents[2] / "docs" / "README.md"
#: A clone has the pages; an installed package says what it has.
DOCUMENTATION = str(_PAGES) if _PAGES.is_file() else "everstream --help"


def greet(config: ServerConfig, models: Models, port: int) -> None:
    """Prints what is served, and how to try it."""
    from server.cli.inspect import format_bytes

    for served in models.versions:
        info, backend = served.service.model, served.service.transfer.identity.backend
        where = "on torch" if backend == "torch" else "on the native runtime"
        purpose = f", which {PURPOSES[info.name]}" if info.name in PURPOSES else ""
        typer.echo(
            f"Everstream serves {info.name}{purpose}: {info.parameters / 1e6:.1f}M parameters,"
            f" {info.attention}, {info.dtype}, {where}.\n"
            f"{info.max_sessions:,} sessions of {format_bytes(info.state_bytes_per_session)} each,"
            f" {_growth(info)}.\n"
        )
    invite(config, port, chats=models.versions[0].service.chat_template.source != PLAIN)


def _growth(info: ModelInfo) -> str:
    """How the memory of a session depends on its text."""
    if not info.context:
        return "at token ten and at token ten million"
    per_token = (
        f"{info.fixed_state_bytes:,} bytes and {info.state_bytes_per_token:,} for each token"
    )
    ends = "where texts end" if info.past == "stop" else "after which old tokens slide out"
    return f"bounded: {per_token}, up to {info.context:,} (--context), {ends} (--past)"


def _openable(host: str) -> str:
    """``host`` as a browser takes it; for one that means all addresses, the loopback's."""
    with contextlib.suppress(ValueError):
        address = ip_address(host)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"[{host}]" if ":" in host else host


def _kept(store: str | None) -> str:
    """Where; the address of a database may have a password in it."""
    if store is None or store == "memory":
        return "in memory, and end with the server"
    if "://" in store:
        return "in the database"
    return f"in {store}"


def _bundled(folder: Path) -> str:
    """A model's name, and what has to be run before it is served."""
    from model.hub.base import has_base, place_of, pull_command

    needs_pull = has_base(folder) and place_of(folder) is None
    return f"{folder.name} (after {pull_command(folder)})" if needs_pull else folder.name


def invite(config: ServerConfig, port: int, chats: bool = False) -> None:
    """Prints a line that can be pasted to see tokens stream, and what comes after it.

    ``chats``: whether the first model answers questions.
    """
    from model.bundled_models import DEFAULT_NAME, bundled_models

    url = f"http://{_openable(config.host)}:{port}"
    path = "completions"
    body: dict[str, object] = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True}
    if chats:
        question = {"role": "user", "content": "Why is the sky blue?"}
        path, body = "chat/completions", {"messages": [question], "stream": True}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.wants_key else ""
    typer.echo(
        f"Open {url}/ or paste:\n\n"
        f"  curl -N {url}/v1/{path} {key}-H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'\n"
    )
    typer.echo(
        f"Sessions are kept {_kept(config.store)} (--store). Ctrl-C stops the server.\n"
        f"Documentation: {DOCUMENTATION}\n"
    )
    others = [folder for name, folder in bundled_models().items() if name != DEFAULT_NAME]
    if config.model[0].source is None and others:
        names = ", ".join(map(_bundled, others))
        typer.echo(f"Also bundled: {names} (--model NAME, repeated for several)\n")
    if config.is_open:
        typer.echo(OPEN_WARNING.format(host=config.host), err=True)
        logging.getLogger("everstream").warning("no API key, and listening on %s", config.host)
