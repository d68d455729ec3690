"""The address names the sessions: a reload and a shared link show them again."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import STUCK_MS, Visit
from tests.browser.reading import (
    ENDLESS,
    begin,
    decode,
    expect_position,
    fork_at,
    open_page,
    story_of,
    token,
    wait_until_ended,
    write,
)
from tests.fakes import STORY
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser


def test_reload_shows_the_text_again_and_goes_on(page: Page, visit: Visit) -> None:
    write(page)
    page.reload()
    expect_position(page, 45)
    assert story_of(page) == "Hello" + decode(STORY[5:45])
    assert page.locator(".story .prompt").text_content() == "Hello"
    token(page, 9).click(modifiers=["Shift"])
    expect_position(page, 15)
    page.get_by_role("button", name="Continue").click()
    first = visit.messages("started")[0]
    expect(page.locator("#summary")).to_contain_text("tokens, seed")
    assert visit.messages("started")[-1]["session"] == first["session"]


def test_reload_in_the_middle_of_a_stream_follows_it(page: Page) -> None:
    begin(page, "Hello", ENDLESS)
    expect(token(page, 100)).to_be_attached()
    page.reload()
    expect(token(page, 300)).to_be_attached()
    expect(page.locator(".story")).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    assert wait_until_ended(page).startswith("Stopped")
    written = story_of(page).removesuffix("\ufffd").encode()
    assert written == b"Hello" + (STORY * (len(written) // len(STORY) + 1))[5 : len(written)]


def test_shared_link_takes_a_stream_over_and_the_first_page_says_so(page: Page) -> None:
    begin(page, "Hello", ENDLESS)
    expect(token(page, 100)).to_be_attached()
    other = page.context.new_page()
    other.goto(page.url)
    expect(page.get_by_role("alert")).to_contain_text("Reload the page to read on here.")
    expect(other.get_by_role("alert")).to_be_hidden()
    other.get_by_role("button", name="Stop").click()
    assert wait_until_ended(other).startswith("Stopped")
    page.reload()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#position")).to_have_text(other.locator("#position").inner_text())


def test_copies_come_back_with_the_text_that_they_share(page: Page) -> None:
    write(page)
    fork_at(page, 9)
    page.fill("#seed", "3")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".figures").nth(1)).to_have_text("55 tokens")
    fork_at(page, 19, pane=1)
    expect(page.locator(".figures").nth(2)).to_have_text("25 tokens")
    before = [story_of(page, pane) for pane in range(3)]
    page.reload()
    expect(page.locator(".figures").nth(2)).to_have_text("25 tokens")
    assert [story_of(page, pane) for pane in range(3)] == before
    expect(page.locator(".origin").nth(2)).to_have_text("from B at 25")


def test_link_to_a_copy_opens_it_alone(page: Page) -> None:
    write(page)
    fork_at(page, 9)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Share").click()
    expect(page.locator("#summary")).to_contain_text("Link to this session copied")
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    expect(page.locator(".figures")).to_have_text("15 tokens")
    assert story_of(page) == "Hello" + decode(STORY[5:15])
    expect(page.locator(".pane")).to_have_count(1)


def test_new_and_close_take_sessions_out_of_the_address(page: Page, server: ServerProcess) -> None:
    write(page)
    one = r"sess_\w+"
    first, second = (re.compile(f"#sessions={','.join([one] * n)}$") for n in (1, 2))
    expect(page).to_have_url(first)
    page.get_by_role("button", name="Add session").click()
    write(page, "Other", 5)
    expect(page).to_have_url(second)
    page.get_by_role("button", name="Close session A").click()
    expect(page).to_have_url(first)
    page.get_by_role("button", name="New").click()
    expect(page).to_have_url(f"{server.url}/")


@pytest.mark.parametrize(
    "address",
    ["#sessions=sess_0123456789abcdef0123456789abcdef", "#sessions=,<img>,a~b", "#elsewhere"],
)
def test_address_of_nothing_is_no_obstacle(
    visit: Visit, server: ServerProcess, address: str
) -> None:
    page = visit.page
    page.goto(f"{server.url}/{address}")
    expect(page.locator("#connection-text")).to_have_text("Connected")
    if "sess_0" in address:
        expect(page.get_by_role("alert")).to_contain_text("no longer has this session")
    write(page)
    assert story_of(page) == "Hello" + decode(STORY[5:45])


def test_text_is_copied_also_where_the_page_has_no_clipboard(
    browser: Browser, server: ServerProcess
) -> None:
    context = browser.new_context()
    context.set_default_timeout(STUCK_MS)
    context.grant_permissions(["clipboard-read"], origin=server.url)
    page = context.new_page()
    page.add_init_script("navigator.clipboard.writeText = undefined")
    open_page(page, server)
    expect(page.get_by_role("button", name="Copy text")).to_be_disabled()
    write(page)
    page.get_by_role("button", name="Copy text").click()
    expect(page.locator("#summary")).to_have_text("Text copied")
    assert page.evaluate("navigator.clipboard.readText()") == story_of(page)
    context.close()
