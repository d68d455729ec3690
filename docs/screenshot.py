"""Takes the pictures of the pages, on a server that runs as `make serve` starts it.

    python docs/screenshot.py URL FOLDER [--prompt TEXT] [--max-tokens N] [--seed N]

Writes of the chat page.png, page-dark.png and page-phone.png, and of the page for texts
page-text.png: two sessions of the model of stories, and the memory of one. So that the pictures can
be taken again, the requests of the chat are sent with temperature 0, and the texts are drawn from
seeds. Needs Playwright for Python and Debian's chromium.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Browser, Page, Route, sync_playwright

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
STORIES = "everstream-stories"
#: The messages of the chat.
MESSAGES = ("What is the capital of France?", "Explain in two sentences why the sky is blue.")


def open_page(browser: Browser, url: str, size: dict[str, int], scheme: str) -> Page:
    """The page as a visitor finds it."""
    context = browser.new_context(
        viewport={"width": size["width"], "height": size["height"]},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=2 if size is PHONE else 1,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(url)
    return page


def greedy(route: Route) -> None:
    """Sends a request for a response with temperature 0."""
    request = route.request
    if request.method == "POST":
        route.continue_(post_data={**request.post_data_json, "temperature": 0})
    else:
        route.continue_()


def chat(page: Page) -> None:
    """Sends the messages, each after the answer to the one before."""
    page.route("**/v1/responses", greedy)
    for number, words in enumerate(MESSAGES, 1):
        page.locator("#send:not([disabled])").wait_for()
        page.fill("#prompt", words)
        page.keyboard.press("Enter")
        page.locator(".about").nth(number - 1).wait_for(timeout=STREAM_TIMEOUT_MS)
    page.evaluate("document.activeElement.blur()")


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
    """Two texts that part after a while, side by side."""
    page.locator("#connection[data-state=open]").wait_for()
    page.select_option("#model", STORIES)
    write(page, "#generate", options.prompt, options, options.seed)
    page.locator(".answer").nth(FORK_AT).dispatch_event("click")
    page.locator(".pane").nth(1).wait_for(timeout=STREAM_TIMEOUT_MS)
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
        "() => [...document.querySelectorAll('.other-text')].every((e) => e.textContent[0] !== '#')"
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
        for name, size, scheme in (
            ("page", DESK, "light"),
            ("page-dark", DESK, "dark"),
            ("page-phone", PHONE, "light"),
        ):
            page = open_page(browser, f"{options.url}/chat", size, scheme)
            chat(page)
            page.screenshot(path=options.folder / f"{name}.png")
        page = open_page(browser, f"{options.url}/?text", DESK, "light")
        branch(page, options)
        look_at_token(page)
        page.screenshot(path=options.folder / "page-text.png")
        browser.close()


if __name__ == "__main__":
    main()
