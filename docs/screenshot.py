"""Takes the README's picture of the page, on a server that is running.

    python docs/screenshot.py URL OUTPUT.png [--dark] [--prompt TEXT] [--max-tokens N] [--seed N]

Needs Playwright for Python and Debian's chromium.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTH_PX, HEIGHT_PX = 1280, 860
STREAM_TIMEOUT_MS = 300_000


def write_story(page: Page, prompt: str, max_tokens: int, seed: int) -> None:
    """Generates from ``prompt`` and returns when the stream has ended."""
    page.locator("#connection[data-state=open]").wait_for()
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#seed", str(seed))
    page.fill("#prompt", prompt)
    page.click("#generate")
    page.locator("#summary:not(:empty)").wait_for(timeout=STREAM_TIMEOUT_MS)
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("output", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--prompt", default="Once upon a time, a little fox")
    parser.add_argument("--max-tokens", type=int, default=180)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        page = browser.new_page(
            viewport={"width": WIDTH_PX, "height": HEIGHT_PX},
            color_scheme="dark" if options.dark else "light",
        )
        page.goto(options.url)
        write_story(page, options.prompt, options.max_tokens, options.seed)
        page.screenshot(path=options.output)
        browser.close()


if __name__ == "__main__":
    main()
