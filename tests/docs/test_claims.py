"""Sentences that state results have a claim each, and each claim holds for the committed files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.docs import claims
from tests.docs.claims import CLAIMS, FIGURE, Claim, Claims, equation, number, rounded
from tests.docs.pages import DOCS
from tests.docs.sentences import prose, sentences

PAGES = ("comparison", "comparison-tables", "convert", "kernels", "streams")
#: Words by which a sentence without figures states a result.
COMPARES = re.compile(
    r"\b(better|worse|best|worst|faster|slower|fastest|slowest|ahead|behind|higher|lower|larger"
    r"|smaller|fewer|fewest|gains?|loses?|helps?|hurts?|leads?|overtakes?|equals?|brings?|costs?"
    r"|worth|lacks?|matters?|little|nothing|control)\b"
)


def text(page: str) -> str:
    (path,) = DOCS.rglob(f"{page}.md")
    return path.read_text(encoding="utf-8")


def wanting(page: str, known: Claims) -> list[str]:
    """Sentences outside of definitions that state something, ask nothing, and are not known."""
    listed = known.given | {claim.sentence for claim in known.claims}
    return [
        sentence
        for section, sentence in sentences(page)
        if section not in known.definitions and sentence not in listed
        if not sentence.rstrip("*").endswith("?")
        if section in known.results
        or FIGURE.search(prose(sentence))
        or COMPARES.search(prose(sentence))
    ]


def uncovered(claim: Claim) -> set[str]:
    """The figures of a sentence that none of its claims has on the left of an equation."""
    left = {str(number(figure)) for figure in claim.figures}
    found = {str(number(match[0])) for match in FIGURE.finditer(prose(claim.sentence))}
    return found - left - {str(number(figure)) for figure in claim.given}


def test_every_page_of_results_has_claims() -> None:
    assert {path.stem for path in CLAIMS.glob("*.toml")} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_claim_holds(page: str) -> None:
    assert list(claims.read(CLAIMS / f"{page}.toml").failures()) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_with_a_result_has_a_claim(page: str) -> None:
    assert wanting(text(page), claims.read(CLAIMS / f"{page}.toml")) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_claim_is_a_sentence_of_its_page(page: str) -> None:
    known = claims.read(CLAIMS / f"{page}.toml")
    found = list(sentences(text(page)))
    assert known.definitions | known.results <= {section for section, _ in found}
    listed = {claim.sentence for claim in known.claims} | known.given
    assert listed - {sentence for _, sentence in found} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_claim_is_computed_or_given(page: str) -> None:
    known = claims.read(CLAIMS / f"{page}.toml")
    assert [(c.sentence, found) for c in known.claims if (found := uncovered(c))] == []


PAGE = """# Title

For readers. It took 3 steps.

## Found

- **It is
  better.** And `x` costs 0.25 [more](a1.md). Plain.
- Half.

| 1 | 2 |
"""


def test_sentences_of_items_and_paragraphs_are_found() -> None:
    assert list(sentences(PAGE)) == [
        ("", "For readers."),
        ("", "It took 3 steps."),
        ("Found", "**It is better.**"),
        ("Found", "And `x` costs 0.25 [more](a1.md)."),
        ("Found", "Plain."),
        ("Found", "Half."),
    ]


def test_sentence_with_a_figure_or_a_comparison_is_wanting() -> None:
    none = Claims({}, (), frozenset({"It took 3 steps."}), frozenset())
    assert wanting(PAGE, none) == ["**It is better.**", "And `x` costs 0.25 [more](a1.md)."]
    every = dataclasses.replace(none, results=frozenset({"Found"}))
    assert wanting(PAGE, every) == [*wanting(PAGE, none), "Plain.", "Half."]


DATA = {"runs": [{"name": f"a_b-{seed}", "x": {"y": seed + 0.25}} for seed in range(3)]}


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A file of results that is not among the committed ones."""
    file = tmp_path / "f.json"
    file.write_text(json.dumps(DATA))
    return file


@pytest.mark.parametrize(
    ("holds", "failures"),
    [
        ("1.25 = v('a_b')", 0),
        ("1.2 = v('a_b')", 0),
        ("1.26 = v('a_b')", 1),
        ("125 % = v('a_b')", 0),
        ("v('a_b') < 1.3", 0),
        ("v('a_b') > 1.3", 1),
        ("v('*') == {'a_b': 1.25}", 0),
        ("w('a_b', '2') == 2.25", 0),
    ],
)
def test_claim_is_compared_with_the_mean_of_what_its_path_finds(
    holds: str, failures: int, result: Path
) -> None:
    values = {"v": f"{result} runs/{{0}}-*/x/y", "w": f"{result} runs/{{0}}-{{1}}/x/y"}
    known = Claims(values, (Claim("S.", (holds,)),), frozenset(), frozenset())
    assert len(list(known.failures())) == failures


def test_path_that_finds_nothing_is_an_error(result: Path) -> None:
    values = {"v": f"{result} runs/{{0}}/z"}
    known = Claims(values, (Claim("S.", ("v('a') > 0",)),), *[frozenset()] * 2)
    with pytest.raises(AssertionError, match="has nothing"):
        list(known.failures())


def test_item_of_a_list_is_chosen_by_its_fields() -> None:
    data = [{"dim": 16, "scale": 0.5, "e": 1}, {"dim": 16, "scale": 1.0, "e": 2}]
    assert list(claims._find(data, ["dim=16&scale=1.0", "e"], "")) == [("", 2)]


def test_figure_is_rounded_as_it_is_written() -> None:
    assert rounded(0.0024567, "2.5e-3") == number("2.5e-3")
    assert rounded(0.601, "60 %") == number("60 %")
    assert rounded(65536.0, "65,536") == number("65,536")
    assert equation("1.0 = a - b") == ("1.0", "a - b")
    assert equation("a == b") == ("", "a == b")


def test_figure_that_no_claim_computes_is_found() -> None:
    claim = Claim("It is 0.5 of 64.", ("0.5 = x",))
    assert uncovered(claim) == {"64"}
    assert uncovered(Claim(claim.sentence, claim.holds, ("64",))) == set()


def test_claims_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        'definitions = ["D"]\nresults = ["R"]\ngiven = ["A\\n b."]\n[values]\nv = "f.json a"\n'
        '[[claims]]\nsentence = "C."\ngiven = ["3"]\nholds = ["v > 1"]\n',
        encoding="utf-8",
    )
    claim = Claim("C.", ("v > 1",), ("3",))
    found = Claims({"v": "f.json a"}, (claim,), frozenset({"A b."}), *map(frozenset, ("D", "R")))
    assert claims.read(path) == found
