"""What a reader does on the page, and what the page says then."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

from tests.reliability.servers import ServerProcess

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
    expect(page.locator("#summary")).not_to_be_empty()
    return page.locator("#summary").inner_text()


def story_of(page: Page, pane: int = 0) -> str:
    return page.locator(".story").nth(pane).text_content() or ""


def token(page: Page, index: int, pane: int = 0) -> Locator:
    """A generated token of a pane."""
    return page.locator(".pane").nth(pane).locator(".answer").nth(index)


def write(page: Page, prompt: str = "Hello", max_tokens: int = 40) -> None:
    """Generates to the end in the active session."""
    begin(page, prompt, max_tokens)
    wait_until_ended(page)


def fork_at(page: Page, index: int, pane: int = 0) -> None:
    """Clicks a token, and waits for the copy."""
    before = page.locator(".pane").count()
    token(page, index, pane).click()
    expect(page.locator(".pane")).to_have_count(before + 1)


def click_while_it_runs(page: Page, index: int, shift: bool = False) -> None:
    """Clicks a token of the only pane in one turn of the page's loop.

    The page ignores a click on text out of sight, and a running text scrolls on by itself.
    """
    token(page, index).evaluate(
        """(token, shiftKey) => {
          token.scrollIntoView({ block: "center", behavior: "instant" });
          token.dispatchEvent(new MouseEvent("click", { bubbles: true, shiftKey }));
        }""",
        shift,
    )


def decode(tokens: bytes) -> str:
    """What the fake engine's tokens, which are bytes, say."""
    return tokens.decode()


def expect_position(page: Page, position: int) -> None:
    """Waits for the position to be shown: the page draws its figures once a frame."""
    expect(page.locator("#position")).to_have_text(f"{position:,}")


def position_of(page: Page) -> int:
    return int(page.locator("#position").inner_text().replace(",", ""))
