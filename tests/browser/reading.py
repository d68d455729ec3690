"""What a reader does on the page, and what the page says then."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.conftest import ServerProcess

# More than any test waits for: a generation that ends only when it is stopped.
ENDLESS = 1_000_000


def open_page(page: Page, server: ServerProcess) -> None:
    page.goto(server.url)
    expect(page.locator("#connection-text")).to_have_text("Connected")


def begin(page: Page, prompt: str, max_tokens: int) -> None:
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#seed", "0")
    page.fill("#prompt", prompt)
    page.get_by_role("button", name="Generate").click()


def wait_until_ended(page: Page) -> str:
    expect(page.locator("#summary")).not_to_be_empty(timeout=30_000)
    return page.locator("#summary").inner_text()


def story_of(page: Page) -> str:
    return page.locator("#story").text_content() or ""


def decode(tokens: bytes) -> str:
    """What the fake engine's tokens, which are bytes, say."""
    return tokens.decode()


def expect_position(page: Page, position: int) -> None:
    """Waits for the position to be shown: the page draws its figures once a frame."""
    expect(page.locator("#position")).to_have_text(f"{position:,}")


def position_of(page: Page) -> int:
    return int(page.locator("#position").inner_text().replace(",", ""))
