"""settings.md has every setting, its flag and default; monitoring.md every metric."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from model.bounds import DEFAULT_STATE_MEMORY_BYTES
from server.config import SHARED_SAVE_INTERVAL, ServerConfig, flag_of, parse_bytes
from server.engine.types import EngineStats, Finished, FinishReason, Usage
from server.observability.metrics import Metrics, Scrape, render
from tests.docs.pages import flags, names, page, rows, section

TEXT = page("settings.md")
MONITORING = page("monitoring.md")
SETTINGS = {names(row[1])[0]: row for row in rows(section(TEXT, "Settings"))}
FIELDS = ServerConfig.model_fields


def variable(field: str) -> str:
    return f"EVERSTREAM_{field.upper()}"


def test_table_has_every_setting() -> None:
    assert list(SETTINGS) == [variable(field) for field in sorted(FIELDS, key=order)]


def test_table_has_every_flag_with_its_variable() -> None:
    shown = {names(row[0])[0] for row in SETTINGS.values() if row[0]}
    assert shown == flags("serve")
    for field in FIELDS:
        flag = SETTINGS[variable(field)][0]
        assert flag in ("", f"`{flag_of(field)}`"), field


def test_table_has_every_default() -> None:
    for field, info in FIELDS.items():
        shown = SETTINGS[variable(field)][2]
        if isinstance(info.default, bool):
            assert shown == ("on" if info.default else "off"), field
        elif shown.endswith(" days"):
            assert info.default == float(shown.split()[0]) * 86_400, field
        elif isinstance(info.default, int | float):
            assert parse_bytes(shown.strip("`")) == info.default, field
        elif isinstance(info.default, str) and info.default:
            assert shown == f"`{info.default}`", field
        elif info.default in ((), ""):
            assert shown == "none", field
    assert (
        parse_bytes(names(SETTINGS["EVERSTREAM_STATE_MEMORY"][2])[0]) == DEFAULT_STATE_MEMORY_BYTES
    )
    shared = f"{SHARED_SAVE_INTERVAL} with a shared store"
    assert shared in SETTINGS["EVERSTREAM_SAVE_INTERVAL_TOKENS"][3]


def test_table_has_every_metric_with_its_type() -> None:
    table = {names(row[0])[0]: row[1] for row in rows(section(MONITORING, "Metrics"))}
    assert table == dict(metrics())


def test_no_metric_is_named_that_does_not_exist() -> None:
    mentioned = set(re.findall(r"\beverstream_\w+", MONITORING))
    assert mentioned <= {name for name, _ in metrics()}


def test_table_has_every_finish_reason() -> None:
    shown = {names(row[0])[0]: names(row[2]) for row in rows(section(MONITORING, "Metrics"))}
    reasons = {"finish_reason", *get_args(FinishReason), "appended"}
    assert set(shown["everstream_requests_total"]) == reasons


def order(field: str) -> tuple[bool, int]:
    """Settings with a flag first, each part in the order of the class."""
    return flag_of(field) not in flags("serve"), list(FIELDS).index(field)


def metrics() -> Iterator[tuple[str, str]]:
    """Name and type of everything that a scrape of a used server shows."""
    counters = Metrics()
    counters.ttft.observe(0.1)
    counters.request_finished(Finished("r", None, 1, 2, "", "stop", Usage(1, 1)))
    stats = EngineStats(4, 1, 1, 1, 0, 64, 1, 1, 0)
    text = render([Scrape("m", counters, [stats])], 1).decode()
    found = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert found
    yield from found
