from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from server.observability.logs import (
    CAUSED_BY_PEERS,
    JsonLines,
    OncePerSecond,
    Redaction,
    TextLines,
)

KEY = "sk-0123456789"


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "everstream.test", "levelno": 20, "levelname": "INFO", "msg": message} | extra
    )
    made.args = args
    return made


def failed(message: str, error: Exception) -> logging.LogRecord:
    """A record with the traceback of ``error``."""
    try:
        raise error
    except type(error):
        made = record(message)
        made.exc_info = sys.exc_info()
        return made


def as_json(made: logging.LogRecord, *keys: str) -> dict[str, Any]:
    line = JsonLines(Redaction(keys)).format(made)
    assert "\n" not in line
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def as_text(made: logging.LogRecord, *keys: str) -> str:
    return TextLines(Redaction(keys)).format(made)


def printed(code: str) -> list[str]:
    """What a process that runs ``code`` writes to stderr: the settings are the whole process's."""
    head = "import logging, warnings\nfrom server.observability.logs import configure\n"
    command = [sys.executable, "-c", head + code]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout == ""
    return run.stderr.splitlines()


def test_json_line_has_time_level_logger_and_message() -> None:
    made = record("%d sessions", 3)
    made.created = 1_700_000_000.25
    assert as_json(made) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "logger": "everstream.test",
        "message": "3 sessions",
    }


def test_json_line_has_the_extra_fields() -> None:
    line = as_json(record("done", request_id="r1", tenant="acme", num_tokens=7, ready=True))
    fields = (line["request_id"], line["tenant"], line["num_tokens"], line["ready"])
    assert fields == ("r1", "acme", 7, True)


def test_json_line_begins_with_the_time_and_extra_fields_cannot_take_its_place() -> None:
    line = as_json(record("done", request_id="r1", time="never", level="none"))
    assert list(line)[:4] == ["time", "level", "logger", "message"]
    assert line["level"] == "INFO"
    assert line["time"] != "never"


def test_json_line_has_the_exception() -> None:
    line = as_json(failed("it broke", ValueError("bad\nvalue")))
    assert line["message"] == "it broke"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: bad\nvalue")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": {1}}, b"\xff", "\ud800", 1e9])
def test_json_line_is_valid_with_any_fields(value: object) -> None:
    line = JsonLines(Redaction(())).format(record("odd", value=value))
    json.loads(line, parse_constant=pytest.fail)


def test_text_line_has_message_and_fields() -> None:
    line = as_text(record("done", request_id="r1", path="/a b", num_tokens=3))
    assert line.endswith(' INFO everstream.test: done request_id=r1 path="/a b" num_tokens=3')


def test_text_line_ends_with_the_traceback() -> None:
    lines = as_text(failed("it broke", ValueError("bad"))).splitlines()
    assert lines[0].endswith("it broke")
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "ValueError: bad"


def test_text_of_others_begins_no_line() -> None:
    line = as_text(record("path %s", "/x\r\n2030 ERROR forged", tenant="a\n2030 ERROR forged"))
    assert line.splitlines() == [line]


LEAKS = [
    f"Authorization: Bearer {KEY}",
    f"authorization=Bearer {KEY}",
    f"Authorization: {KEY}",
    f"Proxy-Authorization: Basic {KEY}",
    f"{{'Authorization': 'Bearer {KEY}', 'host': 'x'}}",
    f'{{\\"authorization\\": \\"Bearer {KEY}\\"}}',
    f"[(b'host', b'x'), (b'authorization', b'Bearer {KEY}')]",
    f"Sec-WebSocket-Protocol: everstream.v1, everstream.key.{KEY}",
]


@pytest.mark.parametrize("leak", LEAKS)
def test_values_in_place_of_a_key_are_redacted(leak: str) -> None:
    for made in (record(leak), record("head", header=leak), failed("it broke", ValueError(leak))):
        line = json.dumps(as_json(made))
        for shown in (line, as_text(made)):
            assert KEY not in shown
            assert "[redacted]" in shown


@pytest.mark.parametrize("key", [KEY, 'a"b\\c', "p(.*)+", "with blank"])
def test_known_keys_are_redacted_wherever_they_are(key: str) -> None:
    leaks = (
        record("got %s", key),
        record("got it", detail=f"<{key}>"),
        record("got it", detail=[key]),
        record("header", detail=f"Authorization: Bearer {key}"),
        failed("it broke", ValueError(f"x{key}x")),
    )
    for made in leaks:
        line = as_json(made, key)
        assert not [value for value in line.values() if key in str(value)]
        assert "[redacted]" in str(line)
        assert key not in as_text(made, key)


def test_a_key_that_begins_like_another_leaves_nothing_of_it() -> None:
    assert as_json(record("key abc-def"), "abc", "abc-def")["message"] == "key [redacted]"


def test_a_known_key_in_a_header_is_redacted_once() -> None:
    line = as_json(record("Authorization: Bearer with blank, Host: x"), "with blank")
    assert line["message"] == "Authorization: [redacted], Host: x"


def test_fields_that_name_a_secret_are_redacted() -> None:
    line = as_json(record("x", prompt="once upon", API_KEY="k", messages=["hi"], request_id="r"))
    shown = [line[name] for name in ("prompt", "API_KEY", "messages")]
    assert shown == ["[redacted]"] * 3
    assert line["request_id"] == "r"


def test_harmless_text_stays_as_it_is() -> None:
    text = "authorization failed for acme; key rotated; everstream.v1"
    assert as_json(record(text), "")["message"] == text


def test_field_that_a_library_adds_to_each_record_is_left_out() -> None:
    made = record("done", request_id="r1", _ray_timestamp_ns=1)
    assert as_text(made).endswith(" done request_id=r1")
    assert "_ray_timestamp_ns" not in as_json(made)


@pytest.mark.process
def test_configured_process_logs_json_of_all_loggers_to_stderr() -> None:
    lines = printed(
        "configure('json', keys=['s3cret'])\n"
        "logging.getLogger('everstream.server').info('one s3cret', extra={'request_id': 'r1'})\n"
        "logging.getLogger('uvicorn.error').warning('two', extra={'color_message': 'x'})\n"
        "logging.getLogger('some.package').error('three')\n"
    )
    parsed = [json.loads(line) for line in lines]
    assert [line["message"] for line in parsed] == ["one [redacted]", "two", "three"]
    assert [line["logger"] for line in parsed][1:] == ["uvicorn.error", "some.package"]
    assert parsed[0]["request_id"] == "r1"
    assert "color_message" not in parsed[1]


@pytest.mark.process
def test_configured_process_logs_text_by_default() -> None:
    (line,) = printed("configure()\nlogging.getLogger('everstream').info('hello')\n")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO everstream: hello", line)


@pytest.mark.process
def test_debug_is_for_our_own_loggers_alone() -> None:
    """The frames of a WebSocket are debug lines of uvicorn's logger, and have prompts in them."""
    lines = printed(
        "configure('text', 'debug')\n"
        "for name in ('everstream.server', 'uvicorn.error', 'websockets.server', 'asyncio'):\n"
        "    logging.getLogger(name).debug('from %s', name)\n"
        "logging.getLogger('uvicorn.error').info('each socket')\n"
    )
    assert [line.rpartition(": ")[2] for line in lines] == ["from everstream.server"]


@pytest.mark.process
def test_level_applies_to_all() -> None:
    lines = printed(
        "configure('text', 'error')\n"
        "for name in ('everstream.async_engine', 'uvicorn', 'some.package'):\n"
        "    logging.getLogger(name).warning('no')\n"
        "    logging.getLogger(name).error('yes')\n"
    )
    assert len(lines) == 3
    assert all(line.endswith("yes") for line in lines)


@pytest.mark.process
def test_configuring_again_replaces_what_was() -> None:
    lines = printed(
        "logging.basicConfig()\nlogging.getLogger('uvicorn').addHandler(logging.StreamHandler())\n"
        "configure('text')\nconfigure('json')\nlogging.getLogger('uvicorn').error('once')\n"
    )
    assert [json.loads(line)["message"] for line in lines] == ["once"]


@pytest.mark.process
def test_unknown_level_is_refused_and_changes_nothing() -> None:
    lines = printed(
        "configure('json')\n"
        "try:\n    configure('text', 'loud')\n"
        "except ValueError as error:\n    logging.getLogger('everstream').info(str(error))\n"
    )
    assert [json.loads(line)["message"] for line in lines] == ["loud is not a log level"]


def test_warnings_that_peers_cause_come_once_a_second_with_their_number() -> None:
    now_s = [0.0]
    limit = OncePerSecond(lambda: now_s[0])

    def passes(level: int, message: str, *args: object) -> logging.LogRecord | None:
        made = record(message, *args, levelno=level)
        return made if limit.filter(made) else None

    assert passes(logging.WARNING, "no more: %s", "one")
    assert not any(passes(logging.WARNING, "no more: %s", number) for number in range(999))
    assert passes(logging.WARNING, "another")
    assert passes(logging.ERROR, "no more: %s", "failed")
    now_s[0] = 1.0
    last = passes(logging.WARNING, "no more: %s", "last")
    assert last is not None
    assert as_text(last).endswith("no more: last suppressed=999")


@pytest.mark.process
def test_loggers_of_what_peers_cause_are_limited() -> None:
    code = f"configure()\nfor name in {[*CAUSED_BY_PEERS]!r} * 100:\n"
    lines = printed(code + "    logging.getLogger(name).warning('%s did it', name)\n")
    for name in CAUSED_BY_PEERS:
        assert 1 <= sum(f"{name} did it" in line for line in lines) <= 3, name
