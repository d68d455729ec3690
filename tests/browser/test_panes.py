"""Several sessions side by side: added, forked, rewound, compared, closed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import httpx
import pytest
from playwright.sync_api import Page, expect

from model.bundled_models import DEFAULT_MODEL
from tests.browser.conftest import StartServer, Visit
from tests.browser.reading import (
    ENDLESS,
    begin,
    click_while_it_runs,
    decode,
    expect_position,
    fork_at,
    open_page,
    position_of,
    story_of,
    token,
    wait_until_ended,
    write,
)
from tests.fakes import STORY
from tests.reliability.servers import ServerProcess
from tests.tiny import write_model

pytestmark = pytest.mark.browser


def test_two_sessions_stream_at_once_over_one_socket(page: Page, visit: Visit) -> None:
    begin(page, "Hello", ENDLESS)
    expect(token(page, 0)).to_be_visible()
    page.get_by_role("button", name="Add session").click()
    expect(page.locator("#prompt")).to_be_focused()
    begin(page, "Other", ENDLESS)
    expect(token(page, 0, pane=1)).to_be_visible()
    first, second = (page.locator(".figures").nth(i) for i in (0, 1))
    seen = first.inner_text(), second.inner_text()
    expect(first).not_to_have_text(seen[0])
    expect(second).not_to_have_text(seen[1])
    page.keyboard.press("Escape")
    page.locator(".badge").first.click()
    page.keyboard.press("Escape")
    expect(page.locator(".running")).to_have_count(0)
    assert len([url for url in visit.urls if url.startswith("ws")]) == 1
    assert len({started["session"] for started in visit.messages("started")}) == 2
    assert story_of(page).startswith("Hello")
    assert story_of(page, 1).startswith("Other")


def test_closing_a_pane_deletes_its_session_and_no_other(
    page: Page, visit: Visit, server: ServerProcess
) -> None:
    write(page)
    page.get_by_role("button", name="Add session").click()
    write(page, "Other", 5)
    page.get_by_role("button", name="Close session A").click()
    expect(page.locator(".pane")).to_have_count(1)
    assert story_of(page).startswith("Other")
    first, second = [started["session"] for started in visit.messages("started")]
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#position")).to_have_text("15")
    assert [deleted["session"] for deleted in visit.messages("deleted")] == [first]
    assert httpx.get(f"{server.url}/v1/sessions/{second}", timeout=60).status_code == 200


def test_prompt_can_go_to_all_sessions_with_a_seed_for_each(page: Page, visit: Visit) -> None:
    page.get_by_role("button", name="Add session").click()
    page.get_by_label("In all sessions").check()
    begin(page, "Hello", 20)
    expect(page.locator(".figures").nth(0)).to_have_text("25 tokens")
    expect(page.locator(".figures").nth(1)).to_have_text("25 tokens")
    assert [message["seed"] for message in visit.sent] == [0, 1]
    assert story_of(page) != story_of(page, 1)


def test_clicked_token_opens_a_copy_that_shares_the_text_up_to_it(page: Page, visit: Visit) -> None:
    write(page)
    fork_at(page, 9)
    shared = "Hello" + decode(STORY[5:15])
    assert story_of(page, 1) == shared
    expect(page.locator(".origin").nth(1)).to_have_text("from A at 15")
    expect(page.get_by_role("note", name="Left session A here")).to_have_count(1)
    assert token(page, 9).get_attribute("data-branches") == "B"
    expect_position(page, 15)
    assert {k: visit.sent[-1][k] for k in ("type", "n", "at")} == {"type": "fork", "n": 1, "at": 15}
    page.fill("#seed", "3")
    page.get_by_role("button", name="Continue").click()
    expect_position(page, 55)
    assert story_of(page, 1).startswith(shared)
    assert story_of(page) == "Hello" + decode(STORY[5:45])
    assert visit.messages("started")[1]["position"] == 15
    page.get_by_role("button", name="Close session B").click()
    expect(page.locator("[data-branches]")).to_have_count(0)


@pytest.mark.parametrize("modifier", ["Shift", None])
def test_copy_says_where_the_text_before_it_can_be_had(
    page: Page, modifier: Literal["Shift"] | None
) -> None:
    write(page)
    fork_at(page, 9)
    token(page, 4, pane=1).click(modifiers=[modifier] if modifier else [])
    expect(page.get_by_role("alert")).to_have_text(
        "This copy begins at token 15. Fork or rewind what is before that where it was copied."
    )
    assert story_of(page, 1) == "Hello" + decode(STORY[5:15])


def test_running_session_can_be_forked_and_goes_on(page: Page) -> None:
    begin(page, "Hello", ENDLESS)
    expect(token(page, 300)).to_be_attached()
    click_while_it_runs(page, 9)
    expect(page.locator(".pane")).to_have_count(2)
    expect(page.locator(".pane").first).to_have_class(re.compile("running"))
    assert story_of(page, 1) == "Hello" + decode(STORY[5:15])
    page.keyboard.press("Alt+1")
    page.keyboard.press("Escape")
    expect(page.locator(".running")).to_have_count(0)


def test_rewind_cuts_the_text_and_the_session(page: Page, visit: Visit) -> None:
    write(page)
    token(page, 9).click(modifiers=["Shift"])
    expect_position(page, 15)
    assert story_of(page) == "Hello" + decode(STORY[5:15])
    assert visit.messages("rewound")[0]["position"] == 15
    page.get_by_role("button", name="Continue").click()
    expect_position(page, 55)
    assert story_of(page) == "Hello" + decode(STORY[5:55])


def test_rewind_ends_what_runs_first(page: Page) -> None:
    begin(page, "Hello", ENDLESS)
    expect(token(page, 50)).to_be_attached()
    click_while_it_runs(page, 9, shift=True)
    expect_position(page, 15)
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#summary")).to_have_text("Back at token 15")
    expect(page.locator("#rate")).to_have_text("\u2013")
    expect(page.locator("#first-token")).to_have_text("\u2013")


def test_rewind_to_a_text_in_sight_leaves_nothing_later_to_go_to(
    visit: Visit, server: ServerProcess
) -> None:
    page = visit.page
    page.set_viewport_size({"width": 1280, "height": 560})
    open_page(page, server)
    write(page, "Hello", 1500)
    page.locator(".page").evaluate("page => { page.scrollTop = 0; }")
    expect(page.get_by_role("button", name="Latest text")).to_be_visible()
    token(page, 9).click(modifiers=["Shift"])
    expect_position(page, 15)
    expect(page.get_by_role("button", name="Latest text")).to_be_hidden()


def test_comparison_dims_what_is_shared_and_says_how_much(page: Page) -> None:
    expect(page.get_by_role("button", name="Compare")).to_be_hidden()
    write(page)
    fork_at(page, 9)
    page.fill("#seed", "3")
    page.get_by_role("button", name="Continue").click()
    wait_until_ended(page)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#comparison")).to_have_text("B shares with A the first 15 tokens.")
    for pane in (0, 1):
        common = page.locator(".pane").nth(pane).locator(".common").all_text_contents()
        assert "".join(common) == "Hello" + decode(STORY[5:15])
    color = "element => getComputedStyle(element).color"
    assert token(page, 0).evaluate(color) != token(page, 12).evaluate(color)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".common")).to_have_count(0)
    expect(page.locator("#comparison")).to_be_empty()


def test_another_token_can_be_had_in_the_place_of_one(page: Page, visit: Visit) -> None:
    write(page)
    token(page, 9).hover()
    others = page.locator(".card-others button")
    expect(others).to_have_count(5)
    others.nth(4).click()
    expect(page.locator(".pane")).to_have_count(2)
    expect(page.locator(".figures").nth(1)).to_have_text("55 tokens")
    (append,) = [message for message in visit.sent if message["type"] == "append"]
    assert append["tokens"] == [visit.messages("token")[9]["top_logprobs"][4]["token_id"]]
    assert visit.messages("forked")[0]["position"] == 14
    replaced = chr(append["tokens"][0])
    assert story_of(page, 1).startswith("Hello" + decode(STORY[5:14]) + replaced)


def test_there_is_an_end_to_the_number_of_sessions(page: Page) -> None:
    write(page)
    for _ in range(7):
        page.keyboard.press("Alt+n")
    expect(page.locator(".pane")).to_have_count(8)
    expect(page.get_by_role("button", name="Add session")).to_be_disabled()
    token(page, 3).dispatch_event("click")
    expect(page.get_by_role("alert")).to_contain_text("room for 8 sessions")


def test_model_is_chosen_for_new_sessions(visit: Visit, start_real: StartServer) -> None:
    page = visit.page
    bundled = str(DEFAULT_MODEL)
    models = ("--model", f"one={bundled}", "--model", f"two={bundled}", "--store", "memory")
    open_page(page, start_real(*models))
    write(page, "Once", 5)
    page.get_by_label("Model of new sessions").select_option("two")
    page.get_by_role("button", name="Add session").click()
    write(page, "Once", 5)
    generates = [message for message in visit.sent if message["type"] == "generate"]
    assert [message["model"] for message in generates] == ["one", "two"]
    assert story_of(page) == story_of(page, 1)


def test_each_model_shows_its_kind_of_state(
    visit: Visit, start_real: StartServer, tmp_path: Path
) -> None:
    kinds = {
        "delta": "S 2 x 16 x 16, conv 3 x 96",
        "elu": "S 2 x 16 x 16, z 2 x 16",
        "vq": "code 64 x 2, v 64 x 2 x 16, count 2 x 64, sum 2 x 64 x 16",
    }
    shown = {
        name: f"{name}: {parts} in each of 2 layers".replace(" x ", " \u00d7 ")
        for name, parts in kinds.items()
    }
    flags = [f"--model={name}={write_model(tmp_path / name, 0, name)}" for name in kinds]
    server = start_real(*flags, "--store", "memory")
    sizes = {"delta": "6.25", "elu": "8.50", "vq": "52"}  # KiB
    page = visit.page
    open_page(page, server)
    for number, (name, parts) in enumerate(shown.items()):
        page.get_by_label("Model of new sessions").select_option(name)
        if number:
            page.get_by_role("button", name="Add session").click()
        expect(page.locator("#model-facts")).to_contain_text(f"{name} attention")
        expect(page.locator("#state-parts")).to_have_text(parts)
        write(page, "Once", 5)
        assert position_of(page) > 5
    for number, name in enumerate(kinds):  # a session keeps its model, whatever is chosen
        page.keyboard.press(f"Alt+{number + 1}")
        expect(page.locator("#state-parts")).to_have_text(shown[name])
        expect(page.locator("#state-bytes")).to_have_text(f"{sizes[name]}\u00a0KiB")
    page.reload()
    expect(page.locator(".figures").nth(2)).to_have_text(re.compile(r"^[1-9]\d* tokens$"))
    for number, name in enumerate(kinds):
        page.keyboard.press(f"Alt+{number + 1}")
        expect(page.locator("#state-parts")).to_have_text(shown[name])
