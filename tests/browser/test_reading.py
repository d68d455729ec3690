"""The page under the hand: smooth text, keyboard, scrolling, narrow screens."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import StartServer, Visit
from tests.browser.reading import (
    ENDLESS,
    begin,
    open_page,
    position_of,
    story_of,
    wait_until_ended,
)
from tests.fakes import STORY
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser


def test_text_is_written_once_per_frame(visit: Visit, start_server: StartServer) -> None:
    page = visit.page
    open_page(page, start_server(step_ms=0))
    page.evaluate(
        """() => {
          window.writes = window.frames_drawn = 0;
          const story = document.querySelector(".story");
          const options = { childList: true, characterData: true, subtree: true };
          new MutationObserver(() => { window.writes += 1; }).observe(story, options);
          const count = () => { window.frames_drawn += 1; requestAnimationFrame(count); };
          requestAnimationFrame(count);
        }"""
    )
    begin(page, "Hello", 3000)
    wait_until_ended(page)
    writes, frames = page.evaluate("[window.writes, window.frames_drawn]")
    assert story_of(page).encode() == b"Hello" + (STORY * 12)[5:3005]
    # Two more: the prompt, and the start of a frame that the counter has not seen yet.
    assert 1 < writes <= frames + 2
    assert writes < 3000


def test_keyboard_alone_writes_stops_and_continues(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the prompt")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".story .answer").first).to_be_visible()
    page.keyboard.press("Escape")
    wait_until_ended(page)
    before = position_of(page)
    page.keyboard.press("Enter")
    expect(page.locator("#position")).not_to_have_text(str(before))
    page.keyboard.press("Escape")


def test_focus_moves_on_from_a_button_that_goes_out(page: Page) -> None:
    page.fill("#max-tokens", str(ENDLESS))
    page.locator("#generate").focus()
    page.keyboard.press("Space")
    expect(page.locator("#stop")).to_be_focused()
    page.keyboard.press("Space")
    expect(page.locator("#continue")).to_be_focused()


def test_reader_who_scrolls_back_is_left_in_peace(visit: Visit, server: ServerProcess) -> None:
    page = visit.page
    page.set_viewport_size({"width": 1280, "height": 560})
    open_page(page, server)
    begin(page, "Hello", ENDLESS)
    expect(page.locator(".story .line")).not_to_have_count(0)
    expect(page.locator("#position")).to_have_text(re.compile(r"^[\d,]+,\d{3}$"))
    scroller = page.locator(".page")
    scroller.evaluate("page => { page.scrollTop = 0; }")
    expect(page.get_by_role("button", name="Latest text")).to_be_visible()
    seen = position_of(page)
    expect(page.locator("#position")).not_to_have_text(f"{seen:,}")
    assert scroller.evaluate("page => page.scrollTop") == 0
    page.get_by_role("button", name="Latest text").click()
    expect(page.get_by_role("button", name="Latest text")).to_be_hidden()
    assert scroller.evaluate("page => page.scrollTop") > 0
    page.keyboard.press("Escape")


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screen_has_no_horizontal_scroll(
    visit: Visit, server: ServerProcess, width: int
) -> None:
    page = visit.page
    page.set_viewport_size({"width": width, "height": 844})
    open_page(page, server)
    page.get_by_text("Sampling").click()
    begin(page, "x" * 300, 300)
    wait_until_ended(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
