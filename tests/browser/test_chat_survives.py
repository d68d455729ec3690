"""The page at `/chat` while its answer is written: followed, reloaded, and its server killed.

The model writes lines, each one of two by chance, until it is stopped: what was lost, came twice
or was drawn anew would make another text than the one of an undisturbed server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from server.api.auth import digest_of
from tests.browser.conftest import STUCK_MS, Visit
from tests.chatty import lines_of_chance, write_chatty
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser

KEY, NARROW_KEY = "a-key-of-the-page", "a-key-without-sessions"
START = Callable[[str], ServerProcess]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[START]:
    """Starts a server with a store, which asks for a key."""
    folder = tmp_path_factory.mktemp("lines")
    model = write_chatty(folder, lines_of_chance())
    keys = folder / "keys.toml"
    keys.write_text(
        key_entry("all", KEY, "read", "generate", "sessions")
        + key_entry("narrow", NARROW_KEY, "read", "generate")
    )
    servers: list[ServerProcess] = []

    def started(store: str) -> ServerProcess:
        place = store if store == "memory" else folder / store
        flags = ("--model", model, "--threads", 1, "--dtype", "float32", "--store", place)
        servers.append(ServerProcess(*flags, "--keys-file", keys))
        servers[-1].start()
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def key_entry(name: str, key: str, *scopes: str) -> str:
    digest = digest_of(key).hex()
    return f'[[key]]\nname = "{name}"\nhash = "sha256:{digest}"\nscopes = {json.dumps(scopes)}\n'


@pytest.fixture(scope="module")
def lines(start: START) -> ServerProcess:
    """A server with a store, which no test leaves killed."""
    return start("store")


def open_chat(page: Page, server: ServerProcess, key: str = KEY) -> None:
    page.goto(f"{server.url}/chat")
    page.fill("#key", key)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_enabled()


def begin(page: Page) -> dict[str, Any]:
    """Asks for lines; returns what the page has sent."""
    page.fill("#prompt", "Write lines.")
    with page.expect_request("**/v1/responses") as sent:
        page.keyboard.press("Enter")
    body = sent.value.post_data_json
    assert isinstance(body, dict)
    return body


def num_lines(page: Page) -> int:
    return page.locator(".assistant .words p").count()


def wait_for_lines(page: Page, at_least: int) -> None:
    page.wait_for_function(
        "least => document.querySelectorAll('.assistant .words p').length >= least", arg=at_least
    )


def stop(page: Page) -> str:
    """Stops the answer; returns its text, of which the page shows every line."""
    page.locator("#stop").click()
    expect(page.locator(".about")).to_contain_text("Stopped.")
    (turn,) = json.loads(page.evaluate("localStorage.getItem('everstream.chat')"))
    answer = turn["answer"]
    assert isinstance(answer, str)
    # A line's end is held back until it is clear that the user's turn does not begin there.
    expect(page.locator(".assistant .words p")).to_have_text(answer.strip().split("\n\n"))
    return answer.strip()


def undisturbed(
    page: Page, server: ServerProcess, body: dict[str, Any], max_tokens: int
) -> list[str]:
    """The lines that the server writes for ``body`` in one go; nearly every token is one."""
    kept = ("background", "idempotency_key", "stream")
    plain = {name: value for name, value in body.items() if name not in kept}
    answer = page.request.post(
        f"{server.url}/v1/responses",
        data={**plain, "max_output_tokens": max_tokens, "store": False},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=STUCK_MS,
    )
    text = answer.json()["output"][0]["content"][0]["text"]
    assert isinstance(text, str)
    return text.split("\n\n")


def assert_undisturbed(page: Page, server: ServerProcess, body: dict[str, Any]) -> None:
    """The answer, which is stopped here, is what the server writes in one go."""
    text = stop(page)
    num_lines = text.count("Line")
    assert text.split("\n\n") == undisturbed(page, server, body, num_lines + 9)[:num_lines]


def posts(visit: Visit) -> int:
    return sum(url.endswith("/v1/responses") for url in visit.urls)


def test_page_follows_the_answer_until_its_reader_scrolls_up(
    visit: Visit, lines: ServerProcess
) -> None:
    page = visit.page
    page.set_viewport_size({"width": 390, "height": 844})
    open_chat(page, lines)
    begin(page)
    last = page.locator(".assistant .words p").last
    for screens in range(1, 4):
        wait_for_lines(page, screens * 30)
        page.wait_for_function(
            """least => {
              const { scrollHeight, scrollTop, clientHeight } = document.querySelector("#scroll");
              return scrollTop > least && scrollHeight - scrollTop - clientHeight < 2;
            }""",
            arg=screens * 30 * 20 - 844,
        )
    box = page.locator("#scroll")
    box.hover()
    page.mouse.wheel(0, -700)
    to_end = page.get_by_role("button", name="To the end")
    expect(to_end).to_be_visible()
    top = box.evaluate("box => box.scrollTop")
    wait_for_lines(page, num_lines(page) + 30)
    assert box.evaluate("box => box.scrollTop") == top
    to_end.click()
    expect(to_end).to_be_hidden()
    stop(page)
    expect(last).to_be_in_viewport()
    expect(page.locator(".about")).to_be_in_viewport(ratio=1)


def test_reload_goes_on_with_the_answer(visit: Visit, lines: ServerProcess) -> None:
    page = visit.page
    open_chat(page, lines)
    body = begin(page)
    wait_for_lines(page, 20)
    before = num_lines(page)
    page.reload()
    expect(page.locator("#messages .user")).to_have_text(["Write lines."])
    wait_for_lines(page, before + 20)
    assert_undisturbed(page, lines, body)
    page.reload()
    expect(page.locator(".about")).to_contain_text("Stopped.")
    expect(page.locator("#send")).to_be_enabled()


@pytest.mark.parametrize("times", [1, 2])
def test_killed_server_continues_the_answer(visit: Visit, lines: ServerProcess, times: int) -> None:
    page = visit.page
    open_chat(page, lines)
    body = begin(page)
    alert = page.get_by_role("alert")
    for _ in range(times):
        wait_for_lines(page, num_lines(page) + 10)
        lines.kill()
        expect(alert).to_contain_text("The connection to the server is lost. Nothing is lost")
        expect(alert).to_be_in_viewport(ratio=1)
        before = num_lines(page)
        lines.start()
        wait_for_lines(page, before + 10)
        expect(alert).to_be_hidden()
    assert any("starting_after=" in url for url in visit.urls)
    assert posts(visit) == 1
    assert_undisturbed(page, lines, body)


def test_page_reloaded_after_a_kill_continues_the_answer(
    visit: Visit, lines: ServerProcess
) -> None:
    page = visit.page
    open_chat(page, lines)
    body = begin(page)
    wait_for_lines(page, 10)
    lines.restart()
    page.reload()
    wait_for_lines(page, 40)
    assert_undisturbed(page, lines, body)


def test_message_that_a_dead_server_missed_is_sent_when_it_is_back(
    visit: Visit, lines: ServerProcess
) -> None:
    page = visit.page
    open_chat(page, lines)
    lines.kill()
    body = begin(page)
    expect(page.get_by_role("alert")).to_contain_text("The connection to the server is lost.")
    lines.start()
    wait_for_lines(page, 10)
    assert_undisturbed(page, lines, body)


def test_answer_that_died_with_a_store_in_memory_is_written_again(
    visit: Visit, start: START
) -> None:
    server = start("memory")
    page = visit.page
    open_chat(page, server)
    body = begin(page)
    wait_for_lines(page, 10)
    with page.expect_event("request", lambda request: request.method == "POST"):
        server.restart()
    wait_for_lines(page, 40)
    assert_undisturbed(page, server, body)
    server.close()


def test_key_without_sessions_can_chat(visit: Visit, lines: ServerProcess) -> None:
    page = visit.page
    open_chat(page, lines, NARROW_KEY)
    body = begin(page)
    wait_for_lines(page, 10)
    with page.expect_event("request", lambda request: request.method == "POST"):
        lines.restart()
    wait_for_lines(page, 40)
    assert_undisturbed(page, lines, body)


def test_answer_moves_to_the_window_that_asks_for_it(visit: Visit, lines: ServerProcess) -> None:
    page = visit.page
    open_chat(page, lines)
    body = begin(page)
    wait_for_lines(page, 10)
    other = visit.page.context.new_page()
    other.goto(f"{lines.url}/chat")
    other.fill("#key", KEY)
    other.keyboard.press("Enter")
    wait_for_lines(other, 20)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("Another window shows this answer while it is written.")
    page.get_by_role("button", name="Show it here").click()
    wait_for_lines(page, num_lines(other) + 10)
    expect(alert).to_be_hidden()
    expect(other.get_by_role("alert")).to_contain_text("Another window")
    assert_undisturbed(page, lines, body)
    expect(other.locator(".about")).to_contain_text("Stopped.")
    expect(other.get_by_role("alert")).to_be_hidden()
    other.get_by_role("button", name="New chat").click()
    expect(page.locator("#welcome")).to_be_visible()
