"""The endless mode, which starts again by itself, and what becomes of a text that has no end."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit
from tests.browser.reading import begin, story_of, token
from tests.fakes import STORY

pytestmark = pytest.mark.browser


def test_endless_generation_counts_on_until_it_is_stopped(page: Page, visit: Visit) -> None:
    page.get_by_label("endless").check()
    begin(page, "Hello", 20)
    expect(token(page, 90)).to_be_attached()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".running")).to_have_count(0)
    expect(page.locator("#summary")).not_to_be_empty()
    started = visit.messages("started")
    assert len(started) > 4
    assert {one["session"] for one in started} == {started[0]["session"]}
    # The fake engine's tokens are bytes; what is cut within a character ends with U+FFFD.
    written = story_of(page).removesuffix("\ufffd").encode()
    assert written == b"Hello" + (STORY * (len(written) // len(STORY) + 1))[5 : len(written)]
    assert len(written) > 90


def test_unchecking_it_lets_the_generation_end(page: Page) -> None:
    page.get_by_label("endless").check()
    begin(page, "Hello", 20)
    expect(token(page, 30)).to_be_attached()
    page.get_by_label("endless").uncheck()
    expect(page.locator("#summary")).to_have_text("20 tokens, seed 0")


def test_text_that_ends_is_set_apart_from_the_next_one(page: Page) -> None:
    page.get_by_label("endless").check()
    begin(page, "The END", 10)
    expect(page.locator(".story hr").first).to_be_attached()
    expect(token(page, 30)).to_be_attached()
    page.keyboard.press("Escape")


def _evaluate(page: Page, script: str) -> object:
    return page.evaluate(f"async () => {{ {script} }}")


def test_long_text_is_shortened_from_its_beginning(page: Page) -> None:
    kept = _evaluate(
        page,
        """
        const { Story } = await import("/static/story.js");
        const { Transcript } = await import("/static/transcript.js");
        const element = document.querySelector(".story");
        const story = new Story(element.parentElement, element, document.querySelector(".latest"));
        const transcript = new Transcript();
        for (let position = 0; position < 500; position += 1) {
          const text = position % 10 === 9 ? `${position}\\n` : `${position} `;
          transcript.addToken({ position, text });
        }
        story.append(...transcript.pieces);
        const count = story.dropFirst(123);
        transcript.dropFirst(count);
        story.truncate(transcript.countUpTo(200));
        transcript.truncate(200);
        return [count, transcript.pieces[0].start, element.textContent, transcript.pieces.length];
        """,
    )
    # Whole lines go: the first one that stays begins with token 130.
    lines = [[f"{n}\n" if n % 10 == 9 else f"{n} " for n in range(130, 200)]]
    assert kept == [130, 130, "".join(lines[0]), 70]


def test_comparison_begins_where_both_texts_are_kept(page: Page) -> None:
    counts = _evaluate(
        page,
        """
        const { numCommon, Transcript } = await import("/static/transcript.js");
        const [whole, cut] = [new Transcript(), new Transcript()];
        for (let position = 0; position < 60; position += 1) {
          whole.addToken({ position, text: `${position} ` });
          cut.addToken({ position, text: position < 40 ? `${position} ` : "other " });
        }
        cut.dropFirst(25);
        return [numCommon(whole, cut), numCommon(cut, whole)];
        """,
    )
    assert counts == [[40, 15], [15, 40]]
