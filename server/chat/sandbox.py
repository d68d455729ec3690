"""Runs chat templates, in a process of its own: this file is its program.

A template is code from a checkpoint. The sandbox keeps it from what Python can
do, but not from running or writing without end; so each
rendering has a deadline, by which the kernel ends the process, and the process
a bound on its memory. It reads requests and writes answers as frames
(`server.workers.frames`), and needs nothing else of this project.

What a template finds is what Hugging Face's tools give it: the same settings and
functions (https://huggingface.co/docs/transformers/chat_templating), but that
its clock shows UTC.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.workers.frames import read_frame, write_frame

MAX_MEMORY_BYTES = 1 << 30

MAX_ERROR_CHARS = 1000

#: A template may write what it is given, as JSON, so many times, and so much of its own: words
#: around each message, and the indents of tools.
MAX_TIMES, MAX_OWN_CHARS = 2, 1 << 18
#: Seconds of processor time: messages that took longer are not rendered again with others.
MAX_AGAIN_S = 0.5
#: Characters behind the place where two texts part, which may decide how those before it are cut.
AHEAD_CHARS = 64


class RaisedByTemplate(Exception):
    """A template called ``raise_exception``."""


class TooLong(Exception):
    """A template writes more than it may."""


class Generation(Extension):
    """``{% generation %}`` marks an assistant's words for training: here they are just words."""

    tags = {"generation"}  # noqa: RUF012 - the library's way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(source: str, variables: dict[str, Any], max_chars: int, now_s: float) -> str:
    """What ``source`` makes of ``variables``. Raises whatever a template can raise, and `TooLong`.

    ``now_s`` is the Unix time that ``strftime_now`` shows.
    """
    now = datetime.fromtimestamp(now_s, UTC)
    parts: list[str] = []
    left = max_chars
    for part in _compiled(source).generate({**variables, "strftime_now": now.strftime}):
        left -= len(part)
        if left < 0:
            raise TooLong(f"it writes more than {max_chars} characters")
        parts.append(part)
    return "".join(parts)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As it is, where Jinja's own would write it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def answer(
    source: str,
    variables: dict[str, Any],
    others: list[dict[str, Any]],
    max_chars: int,
    now_s: float,
    begin: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """``text``, or ``error`` that says what went wrong.

    ``others`` are more messages, ``following``, and what ``variables`` to change for these. For
    each ``shared`` has how many characters its text begins with in common with ``text``, and those
    that come next in it; nothing for one that the template does not allow. Each begins with
    ``begin``, so that each has the whole deadline.
    """
    begin()
    num_given = len(json.dumps([source, variables], ensure_ascii=False))
    max_chars = min(max_chars, MAX_OWN_CHARS + MAX_TIMES * num_given)
    begun_s = time.process_time()
    try:
        text = render(source, variables, max_chars, now_s)
    except Exception as error:  # a template may do anything that Python can get wrong
        return {"error": _message(error)[:MAX_ERROR_CHARS]}
    shared: list[tuple[int, str]] = []
    for other in others if time.process_time() - begun_s < MAX_AGAIN_S else ():
        following = other.pop("following")
        more = {**variables, **other, "messages": [*variables["messages"], *following]}
        begin()
        with contextlib.suppress(Exception):
            longer = render(source, more, max_chars, now_s)
            place = _num_common(text, longer)
            shared.append((place, longer[place : place + AHEAD_CHARS]))
    return {"text": text, "shared": shared}


def _num_common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, (RaisedByTemplate, TooLong, TemplateError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def serve(requests: BinaryIO, answers: BinaryIO, deadline: Callable[[float], object]) -> None:
    """Answers until the requests end. ``deadline`` gets the seconds of each, and 0 after it."""
    while (request := read_frame(requests)) is not None:
        found = answer(begin=partial(deadline, request.pop("timeout_s")), **request)
        deadline(0)
        write_frame(answers, found)


def main() -> None:
    """The process. It outlives a Ctrl-C, which is its parent's affair, but not its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError):  # macOS knows no such bound
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nothing handles the alarm: it ends the process, whatever Python is doing.
    serve(
        sys.stdin.buffer,
        sys.stdout.buffer,
        lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds),
    )


if __name__ == "__main__":
    main()
