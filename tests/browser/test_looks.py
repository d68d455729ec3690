"""Dark and light, contrast, motion, phone width, the policy, and what is spoken."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import STUCK_MS, Visit
from tests.browser.reading import ENDLESS, begin, fork_at, open_page, token, write
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser

PAPER = "getComputedStyle(document.body).backgroundColor"

#: Text and what it stands on, as the page's own colours; see style.css.
PAIRS = [
    *(("ink", "paper"), ("quiet", "paper"), ("state", "paper"), ("cache", "paper")),
    *(("ink", "raised"), ("quiet", "raised"), ("ink", "warn-paper"), ("paper", "ink")),
    *(("quiet", "warn-paper"), ("paper", "state"), ("ink", "calm-paper")),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(visit: Visit, server: ServerProcess, scheme: str) -> None:
    page = visit.page
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    open_page(page, server)
    for text, ground in PAIRS:
        assert contrast(colour(page, text), colour(page, ground)) >= 4.5, (text, ground)
    page.get_by_role("button", name="Unlikely words").click()
    pressed = page.locator("#unlikely").evaluate(
        "button => getComputedStyle(button).backgroundColor"
    )
    share = float(re.findall(r"[\d.]+", pressed)[-1])
    state, paper = colour(page, "state"), colour(page, "paper")
    red, green, blue = (
        round(s * share + p * (1 - share)) for s, p in zip(state, paper, strict=True)
    )
    assert contrast(state, (red, green, blue)) >= 4.5


def test_theme_is_switched_and_remembered(visit: Visit, server: ServerProcess) -> None:
    page = visit.page
    page.emulate_media(color_scheme="light")
    open_page(page, server)
    light = page.evaluate(PAPER)
    page.keyboard.press("Alt+t")
    dark = page.evaluate(PAPER)
    assert dark != light
    page.reload()
    assert page.evaluate(PAPER) == dark
    expect(page.get_by_role("button", name="Dark theme")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Dark theme").click()
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(PAPER) == dark  # what is as the system has it goes with the system


def test_nothing_moves_for_who_wants_it_so(visit: Visit, server: ServerProcess) -> None:
    page = visit.page
    moving = """() => [...document.querySelectorAll("*")].filter((element) => {
      const style = getComputedStyle(element);
      return style.scrollBehavior === "smooth" || parseFloat(style.transitionDuration) > 0 ||
        style.animationName !== "none";
    }).length"""
    open_page(page, server)
    write(page)
    assert page.evaluate(moving) > 0
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(moving) == 0


def test_policy_lets_nothing_in_that_is_not_a_file_of_the_server(
    page: Page, server: ServerProcess
) -> None:
    policy = httpx.get(server.url, timeout=60).headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    page.evaluate(
        """() => {
          window.violations = [];
          const note = ({ effectiveDirective }) => window.violations.push(effectiveDirective);
          document.addEventListener("securitypolicyviolation", note);
          const script = document.createElement("script");
          const style = document.createElement("style");
          const image = document.createElement("img");
          try { script.textContent = "window.injected = true"; } catch { window.refused = true; }
          style.textContent = "body { background: red !important; }";
          image.src = "http://127.0.0.1:9/elsewhere.png";
          document.head.append(script, style, image);
        }"""
    )
    page.wait_for_function("window.violations.includes('img-src')")
    assert page.evaluate("window.injected") is None
    assert page.evaluate("window.refused") is True
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 0, 0)"
    assert "style-src-elem" in page.evaluate("window.violations")


def test_client_is_served_without_what_lies_beside_it(server: ServerProcess) -> None:
    module = httpx.get(f"{server.url}/static/client/everstream.js", timeout=60)
    assert module.status_code == 200
    assert module.headers["content-type"].startswith("text/javascript")
    assert "unsafe" not in module.headers["content-security-policy"]
    for path in (
        "package.json",
        "types/everstream.d.ts",
        "../python/protocol.py",
        "",
        "nothing.js",
        "a" * 300 + ".js",
    ):
        answer = httpx.get(f"{server.url}/static/client/{path}", timeout=60)
        assert answer.status_code == 404, path


def test_phone_shows_one_session_at_a_time_with_tabs(
    browser: Browser, server: ServerProcess
) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 740}, has_touch=True, reduced_motion="reduce"
    )
    context.set_default_timeout(STUCK_MS)
    page = context.new_page()
    open_page(page, server)
    page.locator("#sampling summary").click()
    write(page)
    token(page, 9).tap()
    page.get_by_role("button", name="Fork here").tap()
    tabs = page.locator("#tabs button")
    expect(tabs).to_have_count(2)
    expect(tabs.nth(1)).to_have_attribute("aria-current", "true")
    assert visible_panes(page) == ["Session B"]
    tabs.nth(0).tap()
    expect(page.locator("#position")).to_have_text("45")
    page.wait_for_function("document.querySelector('#panes').scrollLeft === 0")
    assert visible_panes(page) == ["Session A"]
    # A swipe: the row comes to rest at the other session.
    page.locator("#panes").evaluate("row => row.scrollTo(row.clientWidth, 0)")
    expect(tabs.nth(1)).to_have_attribute("aria-current", "true")
    expect(page.locator("#position")).to_have_text("15")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    context.close()


def test_shortcuts_of_the_help_do_what_it_says(page: Page) -> None:
    page.get_by_role("button", name="Keyboard and help").click()
    expect(page.get_by_role("dialog")).to_contain_text("Add a session")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    write(page)
    page.locator("#prompt").focus()
    page.keyboard.press("Alt+n")
    expect(page.locator(".pane")).to_have_count(2)
    page.keyboard.press("Alt+1")
    expect(page.locator(".pane").first).to_have_class(re.compile("active"))
    page.keyboard.press("Alt+c")
    expect(page.locator("#comparison")).to_have_text("A shares with B nothing.")
    page.keyboard.press("Alt+p")
    expect(page.get_by_role("button", name="Unlikely words")).to_have_attribute(
        "aria-pressed", "true"
    )
    page.keyboard.press("Alt+2")
    page.keyboard.press("Alt+x")
    expect(page.locator(".pane")).to_have_count(1)


def test_each_control_can_be_reached_and_shows_its_focus(page: Page) -> None:
    write(page)
    fork_at(page, 9)
    wanted = page.evaluate(
        """() => [...document.querySelectorAll(
            "a, button, input, select, textarea, summary, .page"
          )].filter((element) => element.checkVisibility() && !element.disabled).length"""
    )
    page.evaluate("document.activeElement.blur(); window.reached = new Set()")
    for _ in range(wanted + 1):
        page.keyboard.press("Tab")
        page.evaluate("reached.add(document.activeElement)")
        assert page.evaluate(
            """() => {
              const element = document.activeElement;
              const style = getComputedStyle(element);
              const frame = getComputedStyle(element.closest(".composer") ?? element);
              return element === document.body || style.outlineStyle !== "none" ||
                frame.boxShadow !== "none";
            }"""
        ), page.evaluate("document.activeElement.outerHTML")
    assert page.evaluate("reached.delete(document.body) || true")
    assert page.evaluate("reached.size") == wanted


def test_text_is_spoken_now_and_then(page: Page) -> None:
    page.evaluate(
        """() => {
          window.spoken = [];
          window.began = Date.now();
          const region = document.getElementById("announcer");
          const note = () => window.spoken.push(region.textContent);
          new MutationObserver(note).observe(region, { childList: true });
        }"""
    )
    assert page.locator("#announcer").get_attribute("aria-live") == "polite"
    begin(page, "Hello", ENDLESS)
    expect(page.locator("#announcer")).to_contain_text("fox")
    page.keyboard.press("Escape")
    num_spoken, seconds = page.evaluate("[window.spoken.length, (Date.now() - began) / 1000]")
    assert num_spoken <= 2 + seconds // 4


def colour(page: Page, name: str) -> tuple[int, int, int]:
    """One of the page's colours as the browser has it now."""
    text = page.evaluate(
        """name => {
          const probe = document.body.appendChild(document.createElement("i"));
          probe.style.color = `var(--${name})`;
          const { color } = getComputedStyle(probe);
          probe.remove();
          return color;
        }""",
        name,
    )
    red, green, blue = (int(part) for part in re.findall(r"\d+", text)[:3])
    return red, green, blue


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """The ratio of WCAG 2.2."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: tuple[int, int, int]) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (part / 255 for part in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def visible_panes(page: Page) -> list[str]:
    labels: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(".pane")].filter((pane) => {
          const { left, right } = pane.getBoundingClientRect();
          return left < innerWidth - 1 && right > 1;
        }).map((pane) => pane.getAttribute("aria-label"))"""
    )
    return labels
