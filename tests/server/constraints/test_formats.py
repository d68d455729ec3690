"""Regular expressions, choices and grammars: every text drawn is one of theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from server.constraints.schema import FormatRefused
from tests.server.constraints.drawing import accepts, budgets, compiled, draw

REGEXES = [
    "[0-9]+",
    "[a-z]{200}",
    "(yes|no)(, (yes|no)){0,3}",
    "\\d{3}-\\d{4}",
    "a*b+c?",
    "(a|a)*b",
    "(x+x+)+y",
    '[^\\n"]{5,10}',
    "ü(ß|é)+",
    "[\\u4e00-\\u9fff]{2}",
    "(19|20)\\d\\d-(0[1-9]|1[0-2])",
    "a/b\\\\c",
    "(?i)hello",
    "((((((a))))))",
    "a{0,50}b",
    "[+-]?\\d+(\\.\\d+)?([eE][+-]?\\d+)?",
    '\\{"k": (true|false)\\}',
    "😀{3}",
    "(|a)b",
    "[\\s\\S]{3}",
]
CHOICES = [
    ["yes", "no"],
    ["a"],
    ["a", "ab", "abc"],
    ["", "x"][1:],
    ['with "quotes"', "with \\ and /", "line\nbreak", "tab\t"],
    ["日本", "größe", "😀", "a.b*c", "[x]", "(y)", "{2}", "^$|?+"],
    [f"label {index}" for index in range(500)],
    ["the longer of two texts that begin alike", "the longer of two texts"],
]


@pytest.mark.slow
@pytest.mark.parametrize("regex", REGEXES)
def test_every_text_matches_the_regular_expression(regex: str) -> None:
    grammar = compiled({"type": "regex", "regex": regex})
    for budget in budgets(grammar):
        for seed in range(3):
            text, ended = draw(grammar, seed, budget)
            assert ended, text
            assert re.fullmatch(regex, text), text


@pytest.mark.slow
@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: choices[0][:20])
def test_every_text_is_one_of_the_choices(choices: list[str]) -> None:
    grammar = compiled({"type": "choice", "choices": choices})
    for budget in budgets(grammar):
        for seed in range(5):
            text, ended = draw(grammar, seed, budget)
            assert ended
            assert text in choices
    assert all(accepts(grammar, choice) for choice in choices[:20])
    assert not accepts(grammar, choices[0] + "~")


def is_sum(text: str) -> bool:
    """Reads numbers, ``+``, ``*`` and brackets, as the grammar below writes them."""
    while (shorter := re.sub(r"\(N\)|N[+*]N", "N", re.sub(r"[0-9]+", "N", text))) != text:
        text = shorter
    return text == "N"


def is_nested(text: str) -> bool:
    depth = 0
    for character in text:
        depth += 1 if character == "<" else -1
        if depth < 0:
            return False
    return depth == 0 and bool(text)


def is_equal_counts(text: str) -> bool:
    half = len(text) // 2
    return text == "a" * half + "b" * half and half > 0


def is_program(text: str) -> bool:
    return all(re.fullmatch(r"(let [a-z]+ = \d+|print [a-z]+);", row) for row in text.split("\n"))


PROGRAM = r"""
start: row ("\n" row)*
row: "let " ID " = " NUM ";" | "print " ID ";"
ID: /[a-z]+/
NUM: /[0-9]+/
"""
GRAMMARS: list[tuple[str, Callable[[str], bool]]] = [
    ('start: e\ne: t | e "+" t\nt: f | t "*" f\nf: /[0-9]+/ | "(" e ")"', is_sum),
    ('start: n+\nn: "<" n* ">"', is_nested),
    ('start: ab\nab: "a" ab "b" | "ab"', is_equal_counts),
    (PROGRAM, is_program),
    ('start: "yes" | "no" // a comment with <special> and %json', lambda text: text in "yes no"),
    ('start: "<b>" /[a-z]+/ "</b>"', lambda text: re.fullmatch("<b>[a-z]+</b>", text) is not None),
    ('start: greeting NAME\n!greeting: "hi " | "hello "\nNAME: /[A-Z][a-z]{1,8}/',
     lambda text: re.fullmatch("(hi|hello) [A-Z][a-z]{1,8}", text) is not None),
    ('start: item{2,4}\nitem: /[0-9]/ ","',
     lambda text: re.fullmatch("([0-9],){2,4}", text) is not None),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("lark", "is_text"), GRAMMARS, ids=[lark[:24] for lark, _ in GRAMMARS])
def test_every_text_is_one_of_the_grammar(lark: str, is_text: Callable[[str], bool]) -> None:
    grammar = compiled({"type": "grammar", "grammar": lark})
    for budget in budgets(grammar):
        for seed in range(5):
            text, ended = draw(grammar, seed, budget)
            assert ended, text
            assert is_text(text), text


def test_json_object_is_an_object() -> None:
    grammar = compiled({"type": "json_object"})
    for budget in (*budgets(grammar), 400):
        for seed in range(5):
            text, ended = draw(grammar, seed, budget)
            assert ended
            assert isinstance(json.loads(text), dict), text


@pytest.mark.parametrize(
    ("lark", "named"),
    [
        ('start: %json {"type": "object"}', "%json"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "%llguidance"),
        ('start: <|endoftext|> "a"', "special tokens"),
        ("start: <[0]>", "special tokens"),
        ('start: @other "a"', "other"),
        ("start: x\nx[temperature=0.5]: /a/", "temperature"),
        ("start: x\nx[max_tokens=5]: /a+/", "max_tokens"),
        ('start: x\nx[stop="b"]: /a+/', "stop"),
        ("start: missing", "missing"),
        ('start: "a', "lexer error"),
        ('begin: "a"', "start"),
        ("start: /(?=a)b/", "look-around"),
    ],
)
def test_unsupported_grammar_is_refused(lark: str, named: str) -> None:
    with pytest.raises(FormatRefused, match=re.escape(named)):
        compiled({"type": "grammar", "grammar": lark})


@pytest.mark.parametrize(
    ("regex", "named"),
    [
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(a)\\1", "backreferences"),
        ("\\bword\\b", "lookarounds"),
        ("a^b", "lookarounds"),
        ("(", "unclosed group"),
        ("[z-a]", "invalid"),
        ("a{1000000}", "no end"),
    ],
)
def test_unsupported_regular_expression_is_refused(regex: str, named: str) -> None:
    with pytest.raises(FormatRefused, match=named) as refusal:
        compiled({"type": "regex", "regex": regex})
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 300


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ({"type": "grammar", "grammar": 'start: "a" start'}, "no end"),
        ({"type": "regex", "regex": "(a{1000}){1000}"}, "no end"),
        ({"type": "regex", "regex": "b|(a{1000}){1000}"}, "no end"),
        ({"type": "regex", "regex": "[^\\x00-\\x{10FFFF}]"}, "no text is allowed"),
    ],
)
def test_format_without_a_reachable_end_is_refused(format: dict[str, str], text: str) -> None:
    with pytest.raises(FormatRefused, match=text):
        compiled(format)
