"""The page's examples are formats that are served, and its limits those of the code."""

from __future__ import annotations

import json
import re

import pytest
from pydantic import TypeAdapter

from server.api.schemas import requests
from server.constraints import compiler
from server.constraints import schema as json_schema
from server.constraints.compiler import TrialLimits
from tests.docs.pages import names, page, rows, section
from tests.server.constraints.drawing import compiled, draw

TEXT = page("structured-output.md")
COMMANDS = re.findall(r"^curl .* -d '(.*)'$", TEXT, re.MULTILINE)
FORMAT: TypeAdapter[requests.ResponseFormat] = TypeAdapter(requests.ResponseFormat)


@pytest.mark.parametrize("body", COMMANDS)
def test_example_is_a_format_that_its_tokens_suffice_for(body: str) -> None:
    asked = json.loads(body)
    format = FORMAT.validate_json(json.dumps(asked["response_format"]))
    grammar = compiled(format.model_dump(by_alias=True))
    assert all(draw(grammar, seed, asked["max_tokens"]).ended for seed in range(5))


def test_every_format_is_in_the_table() -> None:
    told = {names(row[0])[0] for row in rows(section(TEXT, "Formats"))}
    choices = TypeAdapter(requests.ResponseFormat).json_schema()["discriminator"]["mapping"]
    assert told == set(choices)


def test_every_keyword_is_named() -> None:
    told = set(names(section(TEXT, "What is refused")))
    keywords = {*json_schema.PLAIN, *json_schema.BOUNDS, *json_schema.APPLICATORS}
    assert keywords <= told
    assert {"properties", "items", "prefixItems", "additionalItems", "$defs"} <= told


def test_limits_are_those_of_the_code() -> None:
    told = {row[0]: row[1] for row in rows(section(TEXT, "Limits")) if len(row) == 2}
    trial = TrialLimits()
    assert told == {
        "a schema": f"{requests.MAX_SCHEMA_BYTES >> 10} KiB, {requests.MAX_SCHEMA_DEPTH} levels",
        "a regular expression": f"{requests.MAX_REGEX_CHARS} characters",
        "a grammar": f"{requests.MAX_GRAMMAR_CHARS} characters",
        "choices": f"{requests.MAX_LISTED_TEXTS}, of {requests.MAX_CHOICE_CHARS} characters, "
        f"{requests.MAX_CHOICES_CHARS} in all",
        "trying a format": f"{trial.max_cpu_s:g} s of processor time, {trial.timeout_s:g} s, "
        f"{trial.max_memory_bytes >> 20} MiB",
        "formats that wait": f"{compiler.MAX_WAITING} for each tenant and model; the next gets 429",
        "results of trials in the cache": f"{compiler.MAX_VERDICTS} for each model",
        "compiled grammars in the cache": f"{compiler.MAX_MATCHERS} for each model",
    }
