"""docs/operate/security.md names settings, defaults and tests that exist."""

from __future__ import annotations

import re

import pytest

from server.api.auth.keys_file import Limits
from server.api.middleware.gate import MAX_HEAD_BYTES
from server.api.middleware.limits import BODY_TIMEOUT_S
from server.config.settings import ServerConfig
from tests.docs.pages import DOCS, flags, names, page, rows, section

PAGE = page("security.md")
BOUNDED = rows(section(PAGE, "What is bounded"))
SETTINGS = [row for row in BOUNDED if len(row) == 4 and row[1].startswith("`")]
TESTS = names(section(PAGE, "How it is tested"))


def default_of(setting: str) -> object:
    if setting.startswith("--"):
        assert setting in flags("serve")
    name = setting.removeprefix("EVERSTREAM_").removeprefix("--").replace("-", "_").lower()
    return ServerConfig.model_fields[name].default


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row[1])
def test_default_is_that_of_the_setting(row: list[str]) -> None:
    default, (number, unit) = default_of(names(row[1])[0]), leading(row[2])
    if default is None:
        assert row[2].startswith(("not bounded", "512 MiB", "4,096"))
    else:
        assert default == number * unit


def leading(text: str) -> tuple[int, int]:
    """The number that ``text`` begins with, and its unit in bytes."""
    found = re.match(r"([\d,]+)(?: (KiB|MiB))?", text)
    if found is None:
        return 0, 1
    return int(found[1].replace(",", "")), {"KiB": 1 << 10, "MiB": 1 << 20}.get(found[2], 1)


def test_fixed_bounds_are_those_of_the_code() -> None:
    fixed = {row[0]: row[2] for row in BOUNDED if row[1] == "fixed"}
    assert fixed["bytes of a request head"] == f"{MAX_HEAD_BYTES >> 10} KiB"
    assert fixed["seconds for a head, for a body"].endswith(f", {BODY_TIMEOUT_S:g}")


def test_every_limit_of_a_tenant_is_there() -> None:
    named = {names(row[1])[0] for row in BOUNDED if len(row) == 3}
    assert named == set(Limits.model_fields)


@pytest.mark.parametrize("name", [name for name in TESTS if name.endswith(".py")])
def test_proof_exists(name: str) -> None:
    text = (DOCS.parent / name).read_text(encoding="utf-8")
    assert re.search(r"^(async )?def test_", text, re.MULTILINE)
