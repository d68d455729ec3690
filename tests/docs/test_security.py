"""docs/operate/security.md names settings and tests that exist."""

from __future__ import annotations

import re

import pytest

from server.api.gate import BODY_TIMEOUT_S, MAX_HEAD_BYTES
from server.config import ServerConfig
from tests.docs.pages import DOCS, names, page, rows, section

PAGE = page("security.md")
BOUNDED = rows(section(PAGE, "What is bounded"))
SETTINGS = [name for name in names(section(PAGE, "What is bounded")) if name.isupper()]
TESTS = names(section(page("kept-sessions.md"), "Tests of security"))


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_exists(name: str) -> None:
    assert name.removeprefix("EVERSTREAM_").lower() in ServerConfig.model_fields


def test_fixed_bounds_are_those_of_the_code() -> None:
    fixed = {row[0]: row[1] for row in BOUNDED if len(row) == 3}
    assert fixed["bytes of a request head"] == f"{MAX_HEAD_BYTES >> 10} KiB"
    assert fixed["seconds for a head, for a body"].endswith(f", {BODY_TIMEOUT_S:g}")


@pytest.mark.parametrize("name", [name for name in TESTS if name.endswith(".py")])
def test_proof_exists(name: str) -> None:
    text = (DOCS.parent / name).read_text(encoding="utf-8")
    assert re.search(r"^(async )?def test_", text, re.MULTILINE)
