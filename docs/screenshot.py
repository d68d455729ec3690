"""Takes the pictures of the page in light, in dark and on a phone, on a server that is running.

    python docs/screenshot.py URL FOLDER [--prompt TEXT] [--max-tokens N] [--seed N]

Writes page.png, page-dark.png and page-phone.png. Needs Playwright for Python and
Debian's chromium.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESK = {"width": 1280, "height": 860}
PHONE = {"width": 360, "height": 760}
STREAM_TIMEOUT_MS = 300_000
#: Where the second session leaves the first one, and what is looked at in it, as tokens.
FORK_AT, LOOK_AT = 38, 5


def open_page(browser: Browser, url: str, size: dict[str, int], scheme: str) -> Page:
    """The page as a visitor finds it, connected."""
    context = browser.new_context(
        viewport={"width": size["width"], "height": size["height"]},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=2 if size is PHONE else 1,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(url)
    page.locator("#connection[data-state=open]").wait_for()
    return page


def write(page: Page, button: str, prompt: str, options: argparse.Namespace, seed: int) -> None:
    """Generates in the active session and returns when the stream has ended."""
    if not page.locator("#max-tokens").is_visible():
        page.locator("#sampling summary").click()
    page.fill("#max-tokens", str(options.max_tokens))
    page.fill("#seed", str(seed))
    page.fill("#prompt", prompt)
    page.click(button)
    page.locator("#summary:not(:empty)").wait_for(timeout=STREAM_TIMEOUT_MS)


def branch(page: Page, options: argparse.Namespace) -> None:
    """Two stories that part after a while, side by side."""
    write(page, "#generate", options.prompt, options, options.seed)
    page.locator(".answer").nth(FORK_AT).dispatch_event("click")
    page.locator(".pane").nth(1).wait_for()
    write(page, "#continue", "", options, options.seed + 1)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    for story in page.locator(".page").all():
        story.evaluate("page => { page.scrollTop = 0; }")
    page.locator(".side").evaluate("side => { side.scrollTop = 0; }")


def look_at_token(page: Page) -> None:
    """Opens the card of a token, with the texts of all the others that might have come."""
    page.locator(".pane").nth(1).locator(".answer").nth(FORK_AT + LOOK_AT).hover()
    page.locator("#card").wait_for()
    page.wait_for_function(
        "![...document.querySelectorAll('.other-text')].some((e) => e.textContent[0] === '#')"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", default="Once upon a time, a little fox")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        page = open_page(browser, options.url, DESK, "light")
        branch(page, options)
        look_at_token(page)
        page.screenshot(path=options.folder / "page.png")

        page = open_page(browser, options.url, DESK, "dark")
        branch(page, options)
        page.click("#compare")
        page.click("#unlikely")
        page.mouse.move(0, 0)
        page.screenshot(path=options.folder / "page-dark.png")

        page = open_page(browser, options.url, PHONE, "light")
        branch(page, options)
        page.screenshot(path=options.folder / "page-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
