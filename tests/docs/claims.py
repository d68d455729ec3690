"""Results that a page states in sentences, each with the file and the key that it rests on.

``benchmarks/studies/claims/<page>.toml`` has three parts:

- ``values``     names of figures: a file of benchmarks/results and a path into it;
- ``claims``     a sentence of the page in full, and what must hold for it: ``0.098 = EXPRESSION``,
                 which is rounded as the figure is, or an expression that is true; ``given`` are
                 figures of a setting;
- ``given``      sentences with figures, or words that compare, that state no result; the headings
                 of ``definitions`` are sections of such sentences. In sections whose headings are
                 in ``results`` every sentence is a claim or given, whatever its words.

Segments of a path are keys. An item of a list is chosen by its ``name``, else by ``field=value``
(several joined by ``&``), else by its number. ``{0}`` is the first argument and ``*`` is anything:
``loss('small', 'delta')`` is the mean over all that the path finds. An argument that is itself
``"*"`` makes a mapping of what it stands for to that mean.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, read_result

CLAIMS = RESULTS.parent / "studies" / "claims"
#: What an expression may call besides the values.
FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (abs, all, any, int, len, max, min, set, sorted, sum)
}
FIGURE = re.compile(r"(?<![\w^.-])\d++(?:,\d{3})*+(?:\.\d++)?+(?:e[+-]?\d++)?+(?![\w^])(?: ?%)?")


@dataclass(frozen=True)
class Claim:
    """A sentence and what must hold."""

    sentence: str
    holds: tuple[str, ...]
    #: Figures of the sentence that are no result, such as a setting.
    given: tuple[str, ...] = ()

    @property
    def figures(self) -> set[str]:
        """The figures that are on the left of an equation."""
        return {figure for text in self.holds if (figure := equation(text)[0])}


@dataclass(frozen=True)
class Claims:
    """All of one page."""

    values: dict[str, str]
    claims: tuple[Claim, ...]
    given: frozenset[str]
    definitions: frozenset[str]
    results: frozenset[str] = frozenset()

    def failures(self) -> Iterator[str]:
        """What does not hold, with what was found in its place."""
        names = FUNCTIONS | {
            name: partial(_value, template) for name, template in self.values.items()
        }
        for claim in self.claims:
            for text in claim.holds:
                figure, expression = equation(text)
                found = eval(expression, {"__builtins__": {}, **names})
                if not (rounded(found, figure) == number(figure) if figure else found is True):
                    yield f"{text}: found {found} ({claim.sentence})"


def read(path: Path) -> Claims:
    """The claims in a file."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return Claims(
        data["values"],
        tuple(
            Claim(_flowed(one["sentence"]), tuple(one["holds"]), tuple(one.get("given", ())))
            for one in data["claims"]
        ),
        frozenset(map(_flowed, data.get("given", []))),
        frozenset(data.get("definitions", [])),
        frozenset(data.get("results", [])),
    )


def equation(text: str) -> tuple[str, str]:
    """``0.098 = EXPRESSION`` as figure and expression; the figure is empty where there is none."""
    left, found, right = text.partition(" = ")
    return (left, right) if found else ("", text)


def number(figure: str) -> Decimal:
    """The figure without the commas of its thousands and its sign of percent."""
    return Decimal(figure.replace(",", "").removesuffix("%").strip())


def rounded(value: float, figure: str) -> Decimal:
    """``value`` with as many places as ``figure`` has; in percent where that is."""
    value = value * 100 if figure.endswith("%") else value
    return Decimal(repr(float(value))).quantize(number(figure))


@cache
def _result(name: str) -> Any:
    return read_result(RESULTS / name)


@cache
def _value(template: str, *arguments: str) -> Any:
    """The mean of what is found; a mapping of such where an argument is ``*``."""
    name, _, path = template.partition(" ")
    starred = [f"{{{index}}}" for index, argument in enumerate(arguments) if argument == "*"]
    assert len(starred) <= 1, (template, arguments)
    segments = path.split("/")
    for index, argument in enumerate(arguments):
        if argument != "*":
            segments = [one.replace(f"{{{index}}}", argument) for one in segments]
    groups: dict[str, list[Any]] = {}
    for key, value in _find(_result(name), segments, ""):
        groups.setdefault(key, []).append(value)
    assert groups, f"{template} has nothing for {arguments}"
    means = {key: _mean(values) for key, values in groups.items()}
    return means if starred else means[""]


def _mean(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else statistics.fmean(values)


def _find(data: Any, path: list[str], key: str) -> Iterator[tuple[str, Any]]:
    """The leaves under a path, each with what ``{...}`` stood for."""
    if not path:
        yield key, data
        return
    pattern = _pattern(path[0])
    for names, value in _children(data):
        for name in names:
            if match := pattern.fullmatch(name):
                yield from _find(value, path[1:], match.groupdict().get("key") or key)
                break


def _pattern(segment: str) -> re.Pattern[str]:
    text = re.escape(segment).replace(r"\*", ".+?")
    return re.compile(re.sub(r"\\\{\d\\\}", "(?P<key>.+?)", text))


def _children(data: Any) -> Iterator[tuple[list[str], Any]]:
    """The values in a container, each with the names by which a path may choose it."""
    if isinstance(data, dict):
        yield from (([str(name)], value) for name, value in data.items())
        return
    for index, item in enumerate(data if isinstance(data, list) else ()):
        fields = item if isinstance(item, dict) else {}
        plain = [f"{name}={value}" for name, value in fields.items() if not _is_container(value)]
        pairs = [f"{one}&{two}" for one in plain for two in plain]
        yield [str(fields["name"])] if "name" in fields else [str(index), *plain, *pairs], item


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list)


def _flowed(text: str) -> str:
    return " ".join(text.split())
