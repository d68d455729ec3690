"""Markdown as the page at `/chat` renders it while it streams in."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import STUCK_MS
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.browser

#: Writes the pieces one by one into `box`, an element outside the page.
WRITE = """
async (pieces) => {
  const { Markdown } = await import("/static/markdown.js");
  const box = document.createElement("div");
  const markdown = new Markdown(box);
  for (const piece of pieces) markdown.write(piece);
  return box.innerHTML;
}
"""

BLOCKS = {
    "paragraphs": ("One\ntwo\n\nThree", "<p>One<br>two</p><p>Three</p>"),
    "headings": ("# One\n###### Six\n#none", "<h2>One</h2><h6>Six</h6><p>#none</p>"),
    "rule": ("a\n\n---\n* * *\nb", "<p>a</p><hr><hr><p>b</p>"),
    "list": ("- a\n- b\n\n- c", "<ul><li><p>a</p></li><li><p>b</p></li><li><p>c</p></li></ul>"),
    "numbered list": ("3. a\n4) b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    "list in a list": (
        "1. a\n   - b\n   - c\n2. d",
        (
            '<ol start="1"><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul></li>'
            "<li><p>d</p></li></ol>"
        ),
    ),
    "list by two spaces": (
        "1. a\n  - b",
        '<ol start="1"><li><p>a</p><ul><li><p>b</p></li></ul></li></ol>',
    ),
    "list and its end": (
        "Two:\n* a\nlazy\n* b\n\nEnd",
        "<p>Two:</p><ul><li><p>a<br>lazy</p></li><li><p>b</p></li></ul><p>End</p>",
    ),
    "two lists": ("- a\n\n1. b", '<ul><li><p>a</p></li></ul><ol start="1"><li><p>b</p></li></ol>'),
    "quote": (
        "> a\n> - b\n\nc",
        "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote><p>c</p>",
    ),
    "table": (
        "| a | b |\n|:--|--:|\n| 1 | `x \\| y` |\n| 2 |\nEnd",
        (
            '<div class="table"><table><tr><th>a</th><th class="right">b</th></tr>'
            '<tr><td>1</td><td class="right"><code>x \\| y</code></td></tr>'
            '<tr><td>2</td><td class="right"></td></tr></table></div><p>End</p>'
        ),
    ),
    "no table": ("a | b\n|---|\nc", "<p>a | b<br>|---|<br>c</p>"),
}

SPANS = {
    "stress": (
        "**a** *b* ***c*** __d__ _e_ ~~f~~",
        (
            "<strong>a</strong> <em>b</em> "
            "<strong><em>c</em></strong> <strong>d</strong> <em>e</em> <del>f</del>"
        ),
    ),
    "stress in stress": ("**a *b***", "<strong>a <em>b</em></strong>"),
    "no stress": ("2 * 3 * 4, snake_case_name, ** a**, *open", None),
    "code": ("`a *b*` ``c ` d`` `` ` ``", "<code>a *b*</code> <code>c ` d</code> <code>`</code>"),
    "open code": ("`a **b**", "`a <strong>b</strong>"),
    "escapes": (r"\*a\* \`b\` \\", r"*a* `b` \\"[:-1]),
    "link": (
        "[a](https://b.example/c_(d)_e) [m](mailto:a@b.example)",
        (
            '<a href="https://b.example/c_(d)_e" target="_blank" rel="noopener noreferrer">a</a> '
            '<a href="mailto:a@b.example" target="_blank" rel="noopener noreferrer">m</a>'
        ),
    ),
    "bare link": (
        "See https://b.example/a_b_c. So",
        (
            'See <a href="https://b.example/a_b_c" target="_blank" rel="noopener noreferrer">'
            "https://b.example/a_b_c</a>. So"
        ),
    ),
    "line break": ("a<br>b", "a<br>b"),
    "image": (
        "![a](https://b.example/c.png)",
        '<a href="https://b.example/c.png" target="_blank" rel="noopener noreferrer">a</a>',
    ),
}

DOCUMENT = "\n\n".join(text for text, _ in (*BLOCKS.values(), *SPANS.values()))
DOCUMENT += "\n\n1. Do:\n   ```sh\n   a  # *b*\n\n     c\n   ```\n2. And\n```\n<d>\n```\nEnd"


@pytest.fixture(scope="module")
def page(browser: Browser, server: ServerProcess) -> Iterator[Page]:
    """A page that has the policy of ours, one for all tests."""
    context = browser.new_context()
    context.set_default_timeout(STUCK_MS)
    page = context.new_page()
    page.goto(f"{server.url}/chat", wait_until="networkidle")
    yield page
    context.close()


def rendered(page: Page, *pieces: str) -> str:
    html = page.evaluate(WRITE, pieces)
    assert isinstance(html, str)
    return html


@pytest.mark.parametrize("kind", BLOCKS)
def test_block(page: Page, kind: str) -> None:
    text, html = BLOCKS[kind]
    assert rendered(page, text) == html


@pytest.mark.parametrize("kind", SPANS)
def test_span(page: Page, kind: str) -> None:
    text, html = SPANS[kind]
    assert rendered(page, text) == f"<p>{text if html is None else html}</p>"


def test_code_is_shown_as_it_is_with_its_language(page: Page) -> None:
    html = rendered(page, "```python\nif a < *b*:\n\n    c\n```\nEnd")
    assert '<div class="code-head"><span>python</span>' in html
    assert html.endswith("<pre><code>if a &lt; *b*:\n\n    c\n</code></pre></div><p>End</p>")
    html = rendered(page, "1. a\n   ```\n   b\n     c\n   ```\n2. d")
    assert "<pre><code>b\n  c\n</code></pre></div></li><li><p>d</p></li></ol>" in html
    assert rendered(page, "~~~\n```\n~~~").count("<pre><code>```\n</code></pre>") == 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_text_is_rendered_alike_however_it_is_cut(page: Page, size: int) -> None:
    pieces = [DOCUMENT[at : at + size] for at in range(0, len(DOCUMENT), size)]
    assert rendered(page, *pieces) == rendered(page, DOCUMENT)


HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](vbscript:x)",
    "[a](/v1/sessions) [b](//evil.example) [c](\x01javascript:alert(1)) <javascript:alert(1)>",
    '[a](https://b.example/"onclick="alert(1)) ![a](x"onerror="alert(1))',
    '```<img src=x onerror=alert(1)>\nx\n```\n~~~"><b>\n~~~',
    "| <b> | <i> |\n|---|---|\n| <script>x</script> | [a](javascript:x) |",
    "# <style>*{display:none}</style>\n> <form action=/x><input name=a></form>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(page: Page, text: str) -> None:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    html = rendered(page, text, "\n")
    names = set(re.findall(r"<(\w+)", html))
    assert names <= {"p", "a", "br", "code", "pre", "div", "span", "button", "table", "tr"} | {
        *("th", "td", "h2", "blockquote", "em", "strong")
    }
    assert not re.search(r"<[^>]*\son\w+=", re.sub(r'="[^"]*"', '=""', html)), html
    for address in re.findall(r'href="([^"]*)"', html):
        assert address.startswith(("https://b.example/", "mailto:")), html
    assert [url for url in urls if not url.endswith("/static/markdown.js")] == []
    assert errors == []


@pytest.mark.parametrize(
    "text",
    [
        *(mark * 20_000 for mark in (">", "- ", "*a", "_", "`a``", "[", "[a](", "**a", "~~", "|")),
        *(mark * 20_000 for mark in ("https://", "\\", "<", "1. ", "#", " ", "![", "***a ")),
        "".join(f"{'  ' * depth}- a\n" for depth in range(500)),
    ],
    ids=lambda text: text[:8],
)
def test_text_made_to_be_slow_is_rendered_whole(page: Page, text: str) -> None:
    html = rendered(page, *(text[at : at + 500] for at in range(0, len(text), 500)))
    assert len(re.findall(r"<(ul|ol|blockquote)", html)) <= 500 * 6
    depth = max_depth = 0
    for tag in re.findall(r"<(/?)(?:ul|ol|blockquote|em|strong|del)\b", html):
        depth += -1 if tag else 1
        max_depth = max(max_depth, depth)
    assert max_depth <= 6 + 2 * 7


def test_lines_that_have_ended_are_not_touched_again(page: Page) -> None:
    """So a selection stays, and the work grows with the text and not with its square."""
    counts = page.evaluate(
        """async () => {
          const { Markdown } = await import("/static/markdown.js");
          const box = document.body.appendChild(document.createElement("div"));
          const markdown = new Markdown(box);
          let made = 0;
          const count = (records) => {
            for (const { addedNodes } of records) made += addedNodes.length;
          };
          const observer = new MutationObserver(count);
          observer.observe(box, { childList: true, subtree: true });
          const line = "- some **bold** words\\n";
          const madeBy = (lines) => {
            made = 0;
            for (const char of line.repeat(lines)) markdown.write(char);
            count(observer.takeRecords());
            return made;
          };
          markdown.write("The first words.\\n\\n");
          getSelection().selectAllChildren(box.firstChild);
          return [madeBy(20), madeBy(20), madeBy(200), String(getSelection())];
        }"""
    )
    first, second, ten_times, selected = counts
    assert second <= first
    assert ten_times == 10 * second
    assert selected == "The first words."
