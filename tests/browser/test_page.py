"""The page at `/`: its text, its one session and its memory."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Page, expect

from server.engine.sampling import published
from tests.browser.conftest import Visit
from tests.browser.reading import (
    ENDLESS,
    begin,
    decode,
    expect_position,
    story_of,
    wait_until_ended,
)
from tests.fakes import MODEL, STORY
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser


def test_streams_the_text_after_the_prompt(page: Page) -> None:
    begin(page, "Hello", 120)
    assert wait_until_ended(page) == "120 tokens, seed 0"
    # The fake engine reads its story from the position, which the prompt has moved.
    assert story_of(page) == "Hello" + decode(STORY[5:125])
    assert page.locator(".story .prompt").text_content() == "Hello"
    expect_position(page, 125)
    expect(page.locator("#first-token")).to_have_text(re.compile(r"^[\d.]+\s(ms|s)$"))
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[\d.,]+$"))


def test_text_grows_while_the_request_runs(page: Page) -> None:
    begin(page, "Hello", ENDLESS)
    expect(page.locator(".story")).to_contain_text("little fox who lived")
    expect(page.locator(".story")).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    assert wait_until_ended(page).startswith("Stopped, ")
    expect(page.locator(".story")).to_have_attribute("aria-busy", "false")


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_stream_and_keeps_text(page: Page, how: str) -> None:
    begin(page, "Hello", ENDLESS)
    expect(page.locator(".story .answer").first).to_be_visible()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    num_tokens = int(re.findall(r"[\d,]+(?= token)", wait_until_ended(page))[0].replace(",", ""))
    expect_position(page, len("Hello") + num_tokens)
    expect(page.get_by_role("button", name="Continue")).to_be_enabled()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()


def test_continue_goes_on_in_the_same_session(page: Page, visit: Visit) -> None:
    begin(page, "Hello", 40)
    wait_until_ended(page)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#position")).to_have_text("85")
    assert story_of(page) == "Hello" + decode(STORY[5:85])
    first, second = visit.messages("started")
    assert first["session"] == second["session"]
    assert second["position"] == 45


def test_words_added_later_join_the_same_session(page: Page, visit: Visit) -> None:
    begin(page, "Hello", 10)
    wait_until_ended(page)
    page.fill("#prompt", " and more ")
    page.press("#prompt", "Enter")
    expect(page.locator("#position")).to_have_text("35")
    assert story_of(page) == f"Hello{decode(STORY[5:15])} and more {decode(STORY[25:35])}"
    assert len({started["session"] for started in visit.messages("started")}) == 1


def test_new_frees_the_session_and_begins_again(page: Page, visit: Visit) -> None:
    begin(page, "Hello", 10)
    wait_until_ended(page)
    page.get_by_role("button", name="New").click()
    expect(page.locator("#position")).to_have_text("0")
    assert story_of(page) == ""
    assert page.locator("#prompt").input_value() == "Hello"
    begin(page, "Again!", 10)
    wait_until_ended(page)
    expect_position(page, 16)
    first, second = visit.messages("started")
    assert first["session"] != second["session"]
    assert [deleted["session"] for deleted in visit.messages("deleted")] == [first["session"]]


def test_new_in_the_middle_of_a_stream_shows_nothing_of_it(page: Page) -> None:
    begin(page, "Hello", ENDLESS)
    expect(page.locator(".story .answer").first).to_be_visible()
    page.get_by_role("button", name="New").click()
    begin(page, "Again", 20)
    assert wait_until_ended(page) == "20 tokens, seed 0"
    assert story_of(page) == "Again" + decode(STORY[5:25])


def test_text_that_has_ended_is_set_apart_from_the_next(page: Page) -> None:
    begin(page, "The END", 50)
    assert wait_until_ended(page) == "End of the text, 1 token, seed 0"
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".story hr")).to_have_count(1)
    expect(page.locator(".story .answer").first).to_be_visible()


def test_memory_is_constant_while_the_cache_would_grow(page: Page) -> None:
    state, cache = page.locator("#state-bytes"), page.locator("#cache-bytes")
    expect(state).to_have_text("438\u00a0KiB")
    expect(cache).to_have_text("0")
    line = page.locator("#chart .state-line").get_attribute("d") or ""
    begin(page, "Hello", 251)
    wait_until_ended(page)
    assert MODEL.kv_cache_bytes_per_token * 256 == 1.5 * 1024**2
    expect(cache).to_have_text("1.50\u00a0MiB")
    expect(state).to_have_text("438\u00a0KiB")
    expect(page.locator("#verdict")).to_contain_text("3.5\u00a0times as much")
    assert page.locator("#chart .state-line").get_attribute("d") != line


def test_sampling_controls_are_sent(page: Page, visit: Visit) -> None:
    page.locator("#temperature").fill("0.5")
    page.locator("#top-p").fill("0.9")
    page.locator("#min-p").fill("0.05")
    page.locator("#typical-p").fill("0.8")
    page.locator("#top-n-sigma").fill("1.5")
    page.locator("#repetition-penalty").fill("1.1")
    page.locator("#presence-penalty").fill("0.5")
    page.locator("#frequency-penalty").fill("-0.5")
    page.fill("#stop-texts", "the end\n\\n\\n")
    page.fill("#top-k", "40")
    begin(page, "Hello", 3)
    wait_until_ended(page)
    by_client = {"type", "request_id", "idempotency_key"}
    message = {k: v for k, v in visit.sent[0].items() if k not in by_client}
    assert message == {
        "prompt": "Hello",
        "model": "fake",
        "keep": True,
        "max_tokens": 3,
        "seed": 0,
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.8,
        "top_n_sigma": 1.5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "top_k": 40,
        "top_logprobs": 5,
        "stop": ["the end", "\n\n"],
    }


def test_seed_left_empty_is_drawn_by_the_server(page: Page, visit: Visit) -> None:
    page.fill("#max-tokens", "3")
    page.press("#prompt", "Enter")
    summary = wait_until_ended(page)
    assert "seed" not in visit.sent[0]
    assert summary == f"3 tokens, seed {visit.messages('started')[0]['seed']}"


def test_value_out_of_range_is_not_sent(page: Page, visit: Visit) -> None:
    begin(page, "Hello", 0)
    expect(page.locator("#max-tokens:invalid")).to_be_focused()
    assert visit.sent == []


def test_prompt_is_shown_as_text_never_as_html(page: Page) -> None:
    markup = "<b>bold</b><img src=x>&amp;"
    begin(page, markup, 5)
    wait_until_ended(page)
    assert story_of(page).startswith(markup)
    expect(page.locator(".story b, .story img")).to_have_count(0)


def test_sliders_show_the_servers_defaults_and_send_none_of_them(page: Page, visit: Visit) -> None:
    for name, value in published().items():
        slider = page.locator(f"#controls input[type=range][name={name}]")
        if name != "top_k":
            expect(slider).to_have_value(f"{value:g}")
    page.locator("#min-p").fill("0.05")
    begin(page, "Hello", 3)
    wait_until_ended(page)
    assert published().keys() & visit.sent[0].keys() == {"min_p", "top_k"}


@pytest.mark.parametrize(("num_tokens", "axis", "unit"), [(300, "y", "MiB"), (1100, "x", "")])
def test_axis_has_one_unit(page: Page, num_tokens: int, axis: str, unit: str) -> None:
    begin(page, "Hello", num_tokens)
    wait_until_ended(page)
    labels = page.locator(f"#chart .ticks-{axis} text").all_text_contents()
    units = [re.sub(r"[\d.,\u00a0]|tokens", "", label) for label in labels if label]
    assert len(units) > 1
    assert set(units) == {unit}


def test_api_is_described_a_click_away(page: Page, server: ServerProcess) -> None:
    page.get_by_role("button", name="Keyboard and help").click()
    for name in ("OpenAPI", "WebSocket messages"):
        address = page.get_by_role("link", name=name).get_attribute("href")
        assert page.request.get(urljoin(f"{server.url}/", str(address))).ok
    page.get_by_role("link", name="HTTP API").click()
    expect(page.locator("#routes")).to_contain_text("/v1/completions")
