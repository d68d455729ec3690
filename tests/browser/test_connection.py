"""The page and its server: errors, a lost connection, the key, and no other host."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import StartServer, Visit
from tests.browser.reading import (
    ENDLESS,
    begin,
    open_page,
    story_of,
    wait_until_ended,
)
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser


def test_server_error_is_shown_in_words(page: Page) -> None:
    begin(page, "Hello", ENDLESS + 1)
    expect(page.get_by_role("alert")).to_contain_text("max_tokens")
    expect(page.locator("#prompt")).to_have_value("Hello")
    assert story_of(page) == ""
    begin(page, "Hello", 5)
    assert wait_until_ended(page) == "5 tokens, seed 0"
    expect(page.get_by_role("alert")).to_be_hidden()


def test_request_that_fails_says_why(page: Page) -> None:
    begin(page, "please <fail> now", 5)
    expect(page.get_by_role("alert")).to_have_text("the model's output is not finite")
    begin(page, "Hello", 5)
    assert wait_until_ended(page) == "5 tokens, seed 0"


def test_lost_server_is_shown_and_found_again(visit: Visit, start_server: StartServer) -> None:
    page = visit.page
    server = start_server()
    open_page(page, server)
    begin(page, "Hello", ENDLESS)
    expect(page.locator(".story .answer").first).to_be_visible()
    server.kill()
    expect(page.locator("#connection")).to_contain_text("Trying again in")
    expect(page.locator("#connection-text")).to_have_text("The connection was lost.")
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    assert "Hello" in story_of(page)

    start_server(server.port)
    expect(page.locator("#connection-text")).to_have_text("Connected")
    expect(page.get_by_role("alert")).to_contain_text("no longer has this session")
    expect(page.get_by_role("button", name="Continue")).to_be_disabled()
    begin(page, "Again", 5)
    assert wait_until_ended(page) == "5 tokens, seed 0"


def test_try_now_does_not_wait_for_the_next_try(visit: Visit, start_server: StartServer) -> None:
    page = visit.page
    server = start_server()
    open_page(page, server)
    page.clock.install()
    server.kill()
    # The page's clock stands still but for what `run_for` says, so no timer can reconnect it.
    page.clock.pause_at("2100-01-01")
    expect(page.get_by_role("button", name="Try now")).to_be_visible()
    start_server(server.port)
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#connection")).to_have_attribute("data-state", "open")


def test_broken_key_entry_is_told_apart_from_a_lost_server(
    visit: Visit, start_server: StartServer
) -> None:
    page = visit.page
    page.goto(start_server(api_keys="first").url)
    expect(page.locator("#connection-text")).to_have_text("Key wanted")
    expect(page.locator("#key-hint")).to_have_text("It is kept in this browser tab only.")
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()


def test_key_is_asked_for_and_kept_in_the_tab(visit: Visit, start_server: StartServer) -> None:
    page = visit.page
    server = start_server(api_keys="first,second")
    page.goto(server.url)
    key = page.get_by_label("This server asks for an API key")
    expect(key).to_be_focused()
    for wrong in ("wrong", "no ASCII: ü€"):
        key.fill(wrong)
        key.press("Enter")
        expect(key).to_have_value("")
        expect(page.locator("#key-hint")).to_have_text("The server did not accept that key.")
    key.fill("second")
    key.press("Enter")
    expect(page.locator("#connection-text")).to_have_text("Connected")
    expect(key).to_be_hidden()
    begin(page, "Hello", 5)
    wait_until_ended(page)
    page.reload()
    expect(page.locator("#connection-text")).to_have_text("Connected")
    assert page.evaluate("Object.keys(localStorage).length") == 0


def test_whole_visit_is_quiet_and_stays_on_its_host(
    page: Page, visit: Visit, server: ServerProcess
) -> None:
    begin(page, "Hello", 30)
    wait_until_ended(page)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#position")).to_have_text("65")
    page.get_by_role("button", name="New").click()
    page.evaluate("document.fonts.ready")
    assert visit.complaints == []
    assert {urlsplit(url).netloc for url in visit.urls} == {f"127.0.0.1:{server.port}"}
    paths = {urlsplit(url).path for url in visit.urls}
    assert {"/v1/models", "/v1/stream", "/static/fonts/newsreader.woff2"} <= paths
