"""The page at `/chat`, with a real RWKV-7 file that thinks before it answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit
from tests.chatty import ANSWER, THOUGHT, write_chatty
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser

KEY = "a-key-of-the-page"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = write_chatty(tmp_path_factory.mktemp("chatty"))
    flags = ("--model", model, "--threads", 1, "--dtype", "float32", "--store", "memory")
    with ServerProcess(*flags, environment={"EVERSTREAM_API_KEYS": KEY}) as server:
        yield server


@pytest.fixture
def chat(visit: Visit, chatty: ServerProcess) -> Page:
    """The page, with the key."""
    page = visit.page
    page.goto(f"{chatty.url}/chat")
    page.fill("#key", KEY)
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#send")).to_be_enabled()
    return page


def ask(page: Page, words: str, number: int) -> None:
    """Sends a message; the ``number``-th answer is whole then."""
    page.fill("#prompt", words)
    page.keyboard.press("Enter")
    expect(page.locator("#messages .assistant > .words")).to_have_count(number)
    expect(page.locator("#messages .assistant").last.locator("> .words")).to_have_text(ANSWER)
    expect(page.locator("#stop")).to_be_disabled()


def test_send_is_disabled_until_the_models_are_known(visit: Visit, chatty: ServerProcess) -> None:
    visit.page.goto(f"{chatty.url}/chat")
    expect(visit.page.locator("#key")).to_be_visible()
    expect(visit.page.locator("#send")).to_be_disabled()


def test_answer_is_whole_and_the_thinking_is_folded_away(chat: Page) -> None:
    ask(chat, "Count.", 1)
    expect(chat.locator(".thinking")).to_have_count(0)
    chat.get_by_label("Think first").check()
    ask(chat, "Count <b>again</b>.", 2)
    assert chat.locator("#messages .user .words").all_inner_texts() == [
        "Count.",
        "Count <b>again</b>.",
    ]
    thought = chat.locator(".thinking .words")
    expect(thought).to_be_hidden()
    chat.get_by_text("Thinking", exact=True).click()
    expect(thought).to_be_visible()
    expect(thought).to_have_text(THOUGHT)
    expect(chat.locator("#summary")).to_contain_text("read")
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator("#messages li")).to_have_count(0)


def test_page_sends_the_earlier_turns_as_they_were(chat: Page) -> None:
    ask(chat, "Count.", 1)
    with chat.expect_request("**/v1/chat/completions") as sent:
        ask(chat, "More.", 2)
    body = sent.value.post_data_json
    assert body["messages"] == [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "More."},
    ]
    assert body["reasoning_effort"] == "none"


def test_refused_message_comes_back_with_the_reason(chat: Page) -> None:
    chat.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=503, json={"error": {"message": "too many requests wait"}}
        ),
    )
    chat.fill("#prompt", "Count.")
    chat.get_by_role("button", name="Send").click()
    expect(chat.get_by_role("alert")).to_have_text("too many requests wait")
    expect(chat.locator("#prompt")).to_have_value("Count.")
    expect(chat.locator("#messages li")).to_have_count(0)


@pytest.mark.parametrize(
    ("body", "words"),
    [('{"error": {"message": "too many connections"}}', "too many connections"), ("", "503")],
)
def test_page_says_why_it_has_no_models(
    visit: Visit, chatty: ServerProcess, body: str, words: str
) -> None:
    visit.page.route("**/v1/models", lambda route: route.fulfill(status=503, body=body))
    visit.page.goto(f"{chatty.url}/chat")
    expect(visit.page.get_by_role("alert")).to_contain_text(words)


def test_new_chat_has_nothing_of_an_answer_that_it_ended(chat: Page) -> None:
    chat.route("**/v1/chat/completions", lambda route: None)  # there is no answer
    chat.fill("#prompt", "Count.")
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator("#stop")).to_be_enabled()
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator("#stop")).to_be_disabled()
    chat.unroute("**/v1/chat/completions")
    with chat.expect_request("**/v1/chat/completions") as sent:
        ask(chat, "More.", 1)
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "More."}]


def test_first_page_of_such_a_model_is_the_chat(chat: Page, chatty: ServerProcess) -> None:
    chat.goto(chatty.url)
    chat.wait_for_url(f"{chatty.url}/chat")
    chat.get_by_role("link", name="Text and sessions").click()
    expect(chat.locator("#connection-text")).to_have_text("Connected")
    expect(chat.get_by_role("link", name="Chat")).to_be_visible()
    assert chat.url == f"{chatty.url}/?text"


def test_first_page_of_other_models_is_the_text(page: Page) -> None:
    expect(page.locator("#model-facts")).not_to_be_empty()
    expect(page.locator("#chat-link")).to_be_hidden()
    assert page.url.endswith("/")


def test_chat_without_a_model_for_it_cannot_be_sent_and_leads_to_the_text(page: Page) -> None:
    page.goto(f"{page.url}chat")
    expect(page.get_by_role("alert")).to_contain_text("No model of this server has a chat template")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#model")).to_be_hidden()
    page.get_by_role("link", name="Text and sessions").click()
    expect(page.locator("#model-facts")).not_to_be_empty()
