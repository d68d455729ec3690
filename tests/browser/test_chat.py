"""The page at `/chat`, with a real RWKV-7 file that thinks before it answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit
from tests.chatty import ANSWER, THOUGHT, write_chatty
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser

KEY = "a-key-of-the-page"
RESPONSES = "**/v1/responses"
PHONE = {"width": 390, "height": 844}


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
    wait_for_answer(page, number)


def wait_for_answer(page: Page, number: int) -> None:
    """The ``number``-th answer is whole, and it is `ANSWER`."""
    expect(page.locator(".about")).to_have_count(number)
    answer = page.locator("#messages .assistant").last.locator("> .words")
    expect(answer.locator("p")).to_have_text(["Here:", "one", "two"])
    expect(answer.locator("ul > li")).to_have_count(2)
    expect(answer.locator("pre")).to_have_text("a\n\nb\n")
    expect(page.locator("#stop")).to_be_disabled()


def refuse(page: Page, status: int, message: str, code: str | None = None) -> None:
    """From now on the server refuses messages."""
    error = {"message": message, "code": code}
    page.route(RESPONSES, lambda route: route.fulfill(status=status, json={"error": error}))


def test_send_is_disabled_until_the_models_are_known(visit: Visit, chatty: ServerProcess) -> None:
    visit.page.goto(f"{chatty.url}/chat")
    expect(visit.page.locator("#key")).to_be_visible()
    expect(visit.page.locator("#send")).to_be_disabled()
    visit.page.fill("#key", "wrong")
    visit.page.get_by_role("button", name="Use this key").click()
    expect(visit.page.locator("#key-hint")).to_have_text("The server did not accept that key.")


def test_empty_page_says_what_the_model_is_for_and_has_examples(chat: Page) -> None:
    expect(chat.get_by_role("heading", name="Chat with chatty")).to_be_visible()
    expect(chat.locator("#welcome-text")).to_contain_text("answers questions")
    examples = chat.locator("#examples button")
    expect(examples).to_have_count(4)
    words = examples.nth(1).inner_text()
    examples.nth(1).click()
    wait_for_answer(chat, 1)
    expect(chat.locator("#messages .user")).to_have_text([words])
    expect(chat.locator("#welcome")).to_be_hidden()


def test_answer_is_whole_and_the_thinking_is_folded_away(chat: Page) -> None:
    ask(chat, "Count.", 1)
    expect(chat.locator(".thinking")).to_have_count(0)
    chat.get_by_label("Think first").check()
    ask(chat, "Count <b>again</b>.", 2)
    expect(chat.locator("#messages .user")).to_have_text(["Count.", "Count <b>again</b>."])
    thought = chat.locator(".thoughts")
    expect(thought).to_be_hidden()
    chat.get_by_text("Thinking", exact=True).click()
    expect(thought).to_be_visible()
    expect(thought).to_have_text(THOUGHT)
    expect(chat.locator(".about").last).to_contain_text("read")
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator("#messages li")).to_have_count(0)
    expect(chat.locator("#welcome")).to_be_visible()


def test_page_sends_the_earlier_turns_as_they_were(chat: Page) -> None:
    chat.get_by_label("Think first").check()
    ask(chat, "Count.", 1)
    chat.get_by_label("Think first").uncheck()
    with chat.expect_request(RESPONSES) as sent:
        ask(chat, "More.", 2)
    body = sent.value.post_data_json
    assert body["input"] == [
        {"role": "user", "content": "Count."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "More."},
    ]
    assert body["reasoning"] == {"effort": "none"}


def test_server_keeps_nothing_of_an_answer_that_the_page_has(
    chat: Page, chatty: ServerProcess
) -> None:
    with chat.expect_response(lambda response: response.request.method == "DELETE") as deleted:
        ask(chat, "Count.", 1)
    assert deleted.value.status == 200
    sessions = chat.request.get(
        f"{chatty.url}/v1/sessions", headers={"authorization": f"Bearer {KEY}"}
    )
    assert deleted.value.json()["deleted"] is True
    assert sessions.json()["data"] == []


def test_code_and_answer_can_be_copied(chat: Page) -> None:
    ask(chat, "Count.", 1)
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for button, text in ((".copy-code", "a\n\nb\n"), (".copy-answer", ANSWER)):
        chat.locator(button).click()
        expect(chat.locator(button)).to_have_text("Copied")
        assert chat.evaluate("navigator.clipboard.readText()") == text


def test_refused_message_comes_back_with_the_reason(chat: Page) -> None:
    refuse(chat, 503, "too many requests wait", "queue_full")
    chat.fill("#prompt", "Count.")
    chat.get_by_role("button", name="Send").click()
    alert = chat.get_by_role("alert")
    expect(alert).to_contain_text("Too many requests wait. Wait a moment and send it again.")
    expect(alert).to_contain_text("Your message is in the box again.")
    expect(chat.locator("#prompt")).to_have_value("Count.")
    expect(chat.locator("#messages li")).to_have_count(0)
    chat.unroute(RESPONSES)
    chat.keyboard.press("Enter")
    wait_for_answer(chat, 1)
    expect(alert).to_be_hidden()


@pytest.mark.parametrize("size", [PHONE, {"width": 1280, "height": 500}])
def test_error_is_in_view_below_a_long_conversation(chat: Page, size: dict[str, int]) -> None:
    chat.set_viewport_size(size)  # type: ignore[arg-type]
    for number in range(1, 5):
        ask(chat, "Count.", number)
    refuse(chat, 400, "the text is too long", "context_length_exceeded")
    chat.fill("#prompt", "Count.")
    chat.keyboard.press("Enter")
    alert = chat.get_by_role("alert")
    expect(alert).to_contain_text("The text is too long. Begin a new chat, or write less.")
    expect(alert).to_be_in_viewport(ratio=1)
    expect(chat.locator("#prompt")).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize(
    ("body", "words"),
    [('{"error": {"message": "too many connections"}}', "Too many connections."), ("", "503")],
)
def test_page_says_why_it_has_no_models(
    visit: Visit, chatty: ServerProcess, body: str, words: str
) -> None:
    page = visit.page
    page.route("**/v1/models", lambda route: route.fulfill(status=503, body=body))
    page.goto(f"{chatty.url}/chat")
    expect(page.get_by_role("alert")).to_contain_text(words)
    page.unroute("**/v1/models")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#key")).to_be_visible()


def test_new_chat_has_nothing_of_an_answer_that_it_ended(chat: Page) -> None:
    chat.route(RESPONSES, lambda route: None)  # there is no answer
    chat.fill("#prompt", "Count.")
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator("#stop")).to_be_enabled()
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator("#stop")).to_be_disabled()
    chat.unroute(RESPONSES)
    with chat.expect_request(RESPONSES) as sent:
        ask(chat, "More.", 1)
    assert sent.value.post_data_json["input"] == [{"role": "user", "content": "More."}]


def test_header_of_a_phone_is_one_row(chat: Page) -> None:
    chat.set_viewport_size(PHONE)  # type: ignore[arg-type]
    boxes = [
        chat.locator(each).bounding_box()
        for each in (".masthead", ".wordmark", "#model", "#new", ".tools a", "#theme")
    ]
    header, *parts = [box for box in boxes if box is not None]
    assert len(parts) == 5
    assert header["height"] < 60
    for left, right in itertools.pairwise(parts):
        assert left["x"] + left["width"] <= right["x"]
        assert right["y"] < left["y"] + left["height"]
    assert chat.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


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


def test_chat_without_a_model_for_it_leads_to_what_works(page: Page) -> None:
    page.goto(f"{page.url}chat")
    expect(page.get_by_role("heading", name="No model of this server can chat")).to_be_visible()
    expect(page.locator("#welcome-text")).to_contain_text("fake has no chat template")
    for absent in ("#composer", "#model", "#new", "#examples"):
        expect(page.locator(absent)).to_be_hidden()
    page.get_by_role("link", name="Write with it").click()
    expect(page.locator("#model-facts")).not_to_be_empty()


def test_whole_visit_is_quiet(chat: Page, visit: Visit) -> None:
    ask(chat, "Count.", 1)
    chat.reload()
    wait_for_answer(chat, 1)
    chat.get_by_role("button", name="New chat").click()
    # Without the key at first, which the server says.
    assert [each for each in visit.complaints if "401" not in each] == []
