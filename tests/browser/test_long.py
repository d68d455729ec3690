"""Long texts, and a server that goes away in the middle of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import StartServer, Visit
from tests.browser.reading import (
    ENDLESS,
    begin,
    open_page,
    position_of,
    story_of,
    token,
    wait_until_ended,
)

pytestmark = pytest.mark.browser


def test_blocks_of_a_long_text_that_are_out_of_sight_are_not_laid_out(
    visit: Visit, start_server: StartServer
) -> None:
    page = visit.page
    open_page(page, start_server(step_ms=0))
    begin(page, "Hello", 8000)
    expect(page.locator("#summary")).to_have_text("8,000 tokens, seed 0")
    blocks = page.evaluate(
        """() => [...document.querySelectorAll(".line")].map((line) => [
          line.textContent.length, line.firstChild.checkVisibility({ contentVisibilityAuto: true }),
        ])"""
    )
    assert len(blocks) > 20
    assert max(length for length, _ in blocks) < 2000
    drawn = [is_drawn for _, is_drawn in blocks]
    assert drawn[-1]
    assert not any(drawn[: len(drawn) // 2])


def test_text_without_line_ends_is_cut_into_blocks_too(page: Page) -> None:
    begin(page, "x" * 4000, 300)
    wait_until_ended(page)
    assert page.locator(".line").first.text_content() == "x" * 4000
    assert story_of(page).startswith("x" * 4000)


def test_time_per_token_is_drawn_along_the_text(page: Page) -> None:
    expect(page.locator("#token-ms")).to_have_text("\u2013")
    begin(page, "Hello", ENDLESS)
    # A busy machine shows many tokens at once, so the line may be some runs of tokens behind.
    drawn = page.wait_for_function(
        """() => {
          const path = document.querySelector(".speed-line").getAttribute("d") ?? "";
          const points = [...path.matchAll(/[ML]([\\d.]+) /g)].map(([, x]) => Number(x));
          const now = Number(document.querySelector("#chart .state-dot").getAttribute("cx"));
          return points.length >= 2 && points.at(-1) > now / 2 ? [points, now] : null;
        }"""
    )
    points, now = drawn.json_value()
    page.get_by_role("button", name="Stop").click()
    wait_until_ended(page)
    expect(page.locator("#token-ms")).to_have_text(re.compile(r"^[\d.]+\s(ms|s)$"))
    assert len(points) <= position_of(page) // 8
    assert points == sorted(points)
    # The axis is that of the chart of memory: no run of tokens is beyond where the session is.
    assert points[-1] <= now


def test_stream_goes_on_where_it_was_after_the_server_was_killed(
    visit: Visit, start_real: StartServer, endless_model: Path, tmp_path: Path
) -> None:
    page = visit.page
    flags = ("--model", str(endless_model), "--store", str(tmp_path / "store"))
    flags += ("--continue-on-start",)
    server = start_real(*flags)
    open_page(page, server)
    begin(page, "Once upon a time", 10_000)
    expect(token(page, 100)).to_be_attached()
    server.kill()
    expect(page.locator("#connection")).to_have_attribute("data-state", re.compile("waiting"))
    expect(page.locator(".story")).to_have_attribute("aria-busy", "true")
    start_real(*flags, port=server.port)
    expect(page.locator("#summary")).to_have_text("10,000 tokens, seed 0")
    expect(page.locator(".taken-up")).to_contain_text("nothing is missing")
    seen = story_of(page)
    expect(page.locator(".taken-up")).to_be_hidden()  # after some seconds

    page.get_by_role("button", name="Add session").click()
    begin(page, "Once upon a time", 10_000)
    expect(page.locator("#summary")).to_have_text("10,000 tokens, seed 0")
    assert story_of(page, 1) == seen
