"""The card of a token: its probability and what else might have come."""

from __future__ import annotations

import math
import re

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import STUCK_MS, Visit
from tests.browser.reading import open_page, story_of, token, write
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser


def test_pointing_at_a_token_shows_how_probable_it_was(page: Page, visit: Visit) -> None:
    write(page)
    event = visit.messages("token")[9]
    token(page, 9).hover()
    share = round(math.exp(event["logprob"]) * 100)
    expect(page.locator("#card-chance")).to_have_text(f"{share}\u00a0% probable")
    expect(page.locator("#card-place")).to_have_text("token 15")
    texts = page.locator(".other-text")
    ids = [top["token_id"] for top in event["top_logprobs"]]
    # The fake tokenizer's ids are bytes; the card shows a space as a sign of it.
    expect(texts.nth(4)).to_have_text("␣" if ids[4] == 32 else chr(ids[4]))
    page.locator("#prompt").hover()
    expect(page.locator("#card")).to_be_hidden()


def test_card_stays_while_the_pointer_is_on_it(page: Page) -> None:
    write(page)
    token(page, 9).hover()
    page.locator("#card-fork").hover()
    page.locator("#card-fork").click()
    expect(page.locator(".pane")).to_have_count(2)
    expect(page.locator("#card")).to_be_hidden()


def test_keyboard_reaches_tokens_their_cards_and_what_they_do(page: Page) -> None:
    write(page)
    page.locator(".page").focus()
    page.keyboard.press("Home")
    expect(page.locator("#card-chance")).to_have_text("your words")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#card-place")).to_have_text("token 6")
    expect(page.locator("#announcer")).to_have_text(re.compile(r"%\sprobable"))
    page.keyboard.press("Escape")
    expect(page.locator("#card")).to_be_hidden()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#card-place")).to_have_text("token 44")
    page.keyboard.press("r")
    expect(page.locator("#position")).to_have_text("44")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.locator(".pane")).to_have_count(2)
    assert story_of(page, 1) == story_of(page)


def test_tap_shows_the_card_and_its_button_forks(browser: Browser, server: ServerProcess) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    context.set_default_timeout(STUCK_MS)
    page = context.new_page()
    open_page(page, server)
    page.locator("#sampling summary").click()
    write(page)
    token(page, 9).tap()
    expect(page.locator("#card")).to_be_visible()
    expect(page.locator(".pane")).to_have_count(1)
    page.get_by_role("button", name="Fork here").tap()
    expect(page.locator(".pane")).to_have_count(2)
    context.close()


def test_improbable_tokens_can_be_underlined(page: Page, visit: Visit) -> None:
    write(page)
    logprobs = [event["logprob"] for event in visit.messages("token")]
    marked = page.locator("[data-surprise]")
    assert min(logprobs) < -1.95 < max(logprobs)
    expect(marked).to_have_count(sum(logprob < -1.95 for logprob in logprobs))
    line = "element => getComputedStyle(element).textDecorationLine"
    assert marked.first.evaluate(line) == "none"
    page.get_by_role("button", name="Unlikely words").click()
    assert marked.first.evaluate(line) == "underline"
