"""The client in a real Chromium, under the server's own content security policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

from docs.screenshot import CHROMIUM, CHROMIUM_ARGS
from tests.clients.javascript.conftest import ROOT

pytestmark = pytest.mark.browser

#: After so long a page is stuck.
STUCK_MS = 120_000

RUN_ALL = """async ({ module, url }) => {
    const { scenarios } = await import(`/tests/clients/javascript/${module}.mjs`);
    const { run } = await import("/tests/clients/javascript/world.mjs");
    const found = {};
    for (const [name, scenario] of Object.entries(scenarios)) {
        try {
            console.log(name);
            await (url ? run(scenario, url, {}) : scenario());
            found[name] = null;
        } catch (error) {
            found[name] = `${error.stack}`;
        }
    }
    return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=CHROMIUM_ARGS, timeout=STUCK_MS
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, proxy_url: str) -> Iterator[Page]:
    """A page of the server's with its strict policy, which is given the files of this tree.

    A page that is made up would not do: it may not speak to the loopback.
    """
    page = browser.new_page()
    page.set_default_timeout(STUCK_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: print(message.text))
    page.route(re.compile(f"{proxy_url}/(tests|clients)/"), give_file)
    page.goto(f"{proxy_url}/docs")
    yield page
    page.close()
    assert complaints == []


def give_file(route: Route) -> None:
    path = ROOT / urlsplit(route.request.url).path.removeprefix("/")
    route.fulfill(body=path.read_text(), content_type="text/javascript")


@pytest.mark.parametrize("module", ["scenarios", "stubbed"])
def test_scenarios_hold_in_chromium(page: Page, proxy_url: str, module: str) -> None:
    url = proxy_url if module == "scenarios" else None
    found = page.evaluate(RUN_ALL, {"module": module, "url": url})
    assert len(found) > 10
    failed = {name: error for name, error in found.items() if error is not None}
    assert failed == {}, "\n\n".join(f"{name}: {error}" for name, error in failed.items())
