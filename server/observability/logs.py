"""The log of the process: a line for a person, or a line of JSON for a collector of logs.

Who logs gives what a line is about through ``extra``: ``request_id``, ``session``,
``tenant`` and the like, and never a prompt or a key. What slips through all the same
meets `Redaction`: the last defence, not the first.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

Format = Literal["text", "json"]

REDACTED = "[redacted]"

#: ``extra`` under these names is never shown.
_SECRET_FIELDS = frozenset(
    {"prompt", "prompts", "messages", "text", "api_key", "api-key", "key", "authorization"}
)
#: The value of the header as text, as a dict's and as ASGI's pairs show it; and the subprotocol.
_HEADER = re.compile(
    r"""((?:authorization|api[-_]key)["'\\]*\s*[:=,]\s*(?:b(?=["']))?["'\\]*)"""
    r"""(?:[a-z]+\s+)?(?:\[redacted\]|[^\s"'\\,;)}\]]+)""",
    re.IGNORECASE,
)
_SUBPROTOCOL = re.compile(r"(everstream\.key\.)[A-Za-z0-9_=-]+")

#: Loggers whose warnings a peer can cause as often as it likes.
CAUSED_BY_PEERS = ("uvicorn.error", "everstream.connections")

#: uvicorn writes two lines for each WebSocket; HTTP clients write URLs, which may be signed.
QUIET = ("uvicorn", "httpx", "httpx2")

#: What needs no quotes in a line of text.
_BARE = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")

#: What each record has; its other attributes came through ``extra``. uvicorn adds the last one.
_OF_EVERY_RECORD = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
)


def configure(
    format: Format = "text",
    level: str = "INFO",
    keys: Iterable[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Sends all logs of the process to ``stream`` (stderr), uvicorn's included.

    ``keys`` are values that must not appear. ``level`` is that of our own loggers.
    Other packages say nothing below INFO, whose debug lines have whole frames and so
    prompts, and those in `QUIET` nothing below WARNING.
    Raises `ValueError` where there is no such level. May be called again.
    """
    redaction = Redaction(keys)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(redaction) if format == "json" else TextLines(redaction))
    wanted = logging.getLevelNamesMapping().get(level.upper())
    if wanted is None:
        raise ValueError(f"{level} is not a log level")
    logging.basicConfig(handlers=[handler], level=max(wanted, logging.INFO), force=True)
    logging.getLogger("everstream").setLevel(wanted)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in QUIET:
        logging.getLogger(name).setLevel(max(wanted, logging.WARNING))
    for name in CAUSED_BY_PEERS:
        logging.getLogger(name).filters = [OncePerSecond()]


class OncePerSecond(logging.Filter):
    """Passes each warning once a second; ``suppressed`` counts those held back since.

    What has another level passes. A message is known by its text before its arguments
    are filled in, so there are few of them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last_s: dict[str, float] = {}
        self._suppressed: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        now_s, message = self._clock(), str(record.msg)
        if now_s - self._last_s.get(message, -math.inf) < 1.0:
            self._suppressed[message] += 1
            return False
        self._last_s[message] = now_s
        if suppressed := self._suppressed.pop(message, 0):
            record.suppressed = suppressed
        return True


class Redaction:
    """Takes keys out of what is about to be logged: known ones, and what stands where one does."""

    def __init__(self, keys: Iterable[str]) -> None:
        shown = {form for key in keys for form in (key, repr(key)[1:-1], json.dumps(key)[1:-1])}
        known = sorted(filter(None, shown), key=len, reverse=True)  # one may begin like another
        self._keys = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        if self._keys is not None:
            text = self._keys.sub(REDACTED, text)
        text = _HEADER.sub(rf"\1{REDACTED}", text)
        return _SUBPROTOCOL.sub(rf"\1{REDACTED}", text)

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """What ``extra`` gave: plain values as they are, others as text, nothing secret.

        A leading underscore is a library's, which adds the field to each record: Ray does.
        """
        added = {n: v for n, v in vars(record).items() if n not in _OF_EVERY_RECORD}
        given = {n: v for n, v in added.items() if not n.startswith("_")}
        return {
            name: REDACTED if name.lower() in _SECRET_FIELDS else self._value(value)
            for name, value in given.items()
        }

    def _value(self, value: Any) -> Any:
        plain = value is None or isinstance(value, bool | int)
        if plain or (isinstance(value, float) and math.isfinite(value)):
            return value
        return self.text(str(value))


class TextLines(logging.Formatter):
    """``time level logger: message name=value ...``, and below it the traceback if there is one."""

    def __init__(self, redaction: Redaction) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._redaction = redaction

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record).strip()
        line = line.replace("\n", "\\n").replace("\r", "\\r")  # no message can begin a line
        fields = self._redaction.fields(record)
        return line + "".join(f" {name}={_word(value)}" for name, value in fields.items())

    def format(self, record: logging.LogRecord) -> str:
        return self._redaction.text(super().format(record))


class JsonLines(logging.Formatter):
    """One JSON object on one line: time, level, logger, message, ``extra``, exception."""

    def __init__(self, redaction: Redaction) -> None:
        super().__init__()
        self._redaction = redaction

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": self._redaction.text(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = self._redaction.text(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = self._redaction.text(record.stack_info)
        return json.dumps(line | self._redaction.fields(record) | line)  # ours win, and come first


def _word(value: Any) -> str:
    """``value`` without blanks around it or breaks in it."""
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
