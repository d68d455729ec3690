"""Whatever a model draws, a call that it ends conforms to the function's schema."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from model.chat import FENCED, FORMS, PARAMETERS, TAGGED, CallForm
from server.api.chat.calls import (
    Arguments,
    CallBegins,
    CallReader,
    Text,
    ToolCallsFormat,
    with_texts,
)
from server.constraints.compiler import FormatCompiler, FreeText, GrammarMatcher
from server.constraints.grammar import ids_of
from server.constraints.worker import answer
from server.errors import InvalidRequest, RequestError
from tests.server.constraints.drawing import vocabulary
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.process

TEXT = {"type": "text"}

WEATHER: dict[str, Any] = {
    "name": "weather",
    "schema": {
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/place"},
            "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["place", "unit"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "string", "maxLength": 12}},
    },
}
NOTHING: dict[str, Any] = {
    "name": "do-nothing",
    "schema": {"type": "object", "properties": {}, "additionalProperties": False},
}
ANYTHING: dict[str, Any] = {"name": "any", "schema": {"type": "object"}}
ANYTHING_LISTED: dict[str, Any] = {
    "name": "listed",
    "schema": {"type": "object", "properties": {"a": {"type": "string"}}},
}
SCHEMAS = {function["name"]: function["schema"] for function in (WEATHER, NOTHING, ANYTHING)}


@pytest.fixture
async def constraints() -> AsyncIterator[FormatCompiler]:
    made = FormatCompiler(tiny_tokenizer())
    yield made
    await made.close()


def calls(
    *functions: Any, most: int = 1, otherwise: Any = None, form: CallForm = TAGGED
) -> ToolCallsFormat:
    given = {"functions": [*functions], "max_calls": most, "otherwise": otherwise}
    return ToolCallsFormat.model_validate({"form": form.name, **given})


async def start(constraints: FormatCompiler, format: ToolCallsFormat) -> GrammarMatcher:
    grammar = await constraints.grammar(format)  # type: ignore[arg-type]
    assert grammar is not None
    return constraints.matcher(grammar)


def drawn(matcher: GrammarMatcher, seed: int, most: int = 120) -> str:
    """What a model writes in at most so many tokens that draws at random."""
    tokenizer, draw = tiny_tokenizer(), random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most and not matcher.is_over():
        mask = matcher.allowed(most - len(tokens))
        ids = [id for id in range(tokenizer.vocab_size) if mask[id // 32] >> (id % 32) & 1]
        token = draw.choice(ids)
        if token == tokenizer.eos_token_id:
            break
        matcher.accept(token)
        tokens.append(token)
    return tokenizer.decode(tokens)


def read(text: str, form: CallForm = TAGGED) -> tuple[list[tuple[str, Any]], str, bool]:
    """The calls with their arguments, the text, and whether all is complete."""
    tools = [{"function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
    reader = CallReader(with_texts(form, tools))
    names: list[str] = []
    arguments: list[str] = []
    words = ""
    for piece in reader.push(text) + reader.end(is_whole=True):
        if isinstance(piece, CallBegins):
            names.append(piece.name)
            arguments.append("")
        elif isinstance(piece, Arguments):
            arguments[piece.index] += piece.text
        elif isinstance(piece, Text):
            words += piece.text
    found = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    return found, words, reader.is_complete


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
async def test_forced_calls_are_calls_of_their_functions(
    constraints: FormatCompiler, form: CallForm
) -> None:
    beginning = await start(constraints, calls(WEATHER, NOTHING, ANYTHING, most=3, form=form))
    for seed in range(20):
        # By parameters the shortest call takes 136 tokens of this vocabulary.
        text = drawn(beginning.copy(), seed, 120 if form.parameter is None else 400)
        assert text.startswith(form.opening + form.begin)
        found, words, is_complete = read(text, form)
        assert is_complete, text
        assert words == ""
        assert 1 <= len(found) <= 3
        for name, arguments in found:
            jsonschema.validate(arguments, SCHEMAS[name])


async def test_one_call_is_over_with_its_end(constraints: FormatCompiler) -> None:
    matcher = await start(constraints, calls(NOTHING))
    text = '<tool_call>\n{"name": "do-nothing", "arguments": {}}\n</tool_call>'
    for token in tiny_tokenizer().encode(text):
        matcher.accept(token)
    assert matcher.is_over()


async def test_an_answer_is_text_or_calls_and_never_both(constraints: FormatCompiler) -> None:
    beginning = await start(constraints, calls(WEATHER, most=2, otherwise=TEXT))
    for seed in range(20):
        text = drawn(beginning.copy(), seed)
        found, words, is_complete = read(text)
        assert words == text or (found and not words and is_complete), text


async def test_text_that_is_no_call_is_not_closed(constraints: FormatCompiler) -> None:
    """With few tokens left everything may come that could come before."""
    matcher = await start(constraints, calls(WEATHER, otherwise=TEXT))
    text = [id for id in ids_of(matcher.allowed()) if not leads_to_a_call(id)]
    assert set(text) <= set(ids_of(matcher.allowed(1)))
    for token in tiny_tokenizer().encode("<b>It rains."):
        matcher.accept(token)
    assert (matcher.allowed(1) == matcher.allowed()).all()


def leads_to_a_call(id: int) -> bool:
    text = tiny_tokenizer().token_bytes(id)
    return b"<tool_call>".startswith(text) or text.startswith(b"<tool_call>")


async def accepts(constraints: FormatCompiler, format: ToolCallsFormat, text: str) -> bool:
    matcher, eos = await start(constraints, format), tiny_tokenizer().eos_token_id
    try:
        for token in tiny_tokenizer().encode(text):
            matcher.accept(token)
    except RequestError:
        return False
    return matcher.is_over() or bool(matcher.allowed()[eos // 32] >> (eos % 32) & 1)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "x", "unit": "C"}}\n</tool_call>'


async def test_a_model_may_choose_between_text_and_calls(constraints: FormatCompiler) -> None:
    format = calls(WEATHER, NOTHING, most=2, otherwise=TEXT)
    for text in ("", "It rains.", "<tool_cal", "The <tool_call> is\nbroken", CALL):
        assert await accepts(constraints, format, text), text
    assert await accepts(constraints, format, f"{CALL}\n{CALL}")
    for text in ("<tool_call>", "<tool_call>\nIt rains.", f"{CALL}\n", f"{CALL}\n" * 2 + CALL):
        assert not await accepts(constraints, format, text), text


async def test_answer_that_begins_with_the_fence_is_a_call(constraints: FormatCompiler) -> None:
    format = calls(WEATHER, otherwise=TEXT, form=FENCED)
    call = '```json\n{"name": "weather", "arguments": {"place": "x", "unit": "C"}}\n```'
    for text in ("It rains.", "```", "```python\na\n```", "See:\n```json\n{}\n```", CALL, call):
        assert await accepts(constraints, format, text), text
    for text in ("```json", "```json\n{}\n```", f"{call}\n"):
        assert not await accepts(constraints, format, text), text


async def test_instead_of_text_there_may_be_json(constraints: FormatCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for otherwise in (named, {"type": "json_object"}):
        format = calls(WEATHER, otherwise=otherwise)
        assert await accepts(constraints, format, CALL)
        assert await accepts(constraints, format, '{"a": 1}')
        assert not await accepts(constraints, format, "It rains.")
    assert not await accepts(constraints, calls(WEATHER, otherwise=named), '{"b": 1}')


async def test_unsupported_schema_names_its_function(
    constraints: FormatCompiler,
) -> None:
    schema = {"type": "object", "dependentSchemas": {}}
    with pytest.raises(InvalidRequest, match="weather: dependentSchemas"):
        await start(constraints, calls({"name": "weather", "schema": schema}))


async def test_a_short_answer_goes_through_the_vocabulary_once(
    constraints: FormatCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few tokens left, of whatever request and with whatever tools."""
    asked: list[bytes] = []
    is_free = FreeText.is_free
    monkeypatch.setattr(
        FreeText, "is_free", lambda self, begun: asked.append(begun) or is_free(self, begun)
    )
    masks = []
    for function in (WEATHER, NOTHING, NOTHING):
        place = await start(constraints, calls(function, otherwise=TEXT))
        masks.append(place.allowed(3))
    assert len(asked) < 2 * tiny_tokenizer().vocab_size
    assert len(ids_of(masks[0])) > 200
    assert all((mask == masks[0]).all() for mask in masks)


TEXT_VALUE = {"type": "string"}


def in_form(*parameters: str) -> str:
    return "<tool_call>\n<function=f>\n" + "".join(parameters) + "</function>\n</tool_call>"


def given(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


async def accepts_parameters(
    constraints: FormatCompiler, properties: Any, *required: str, text: str, **more: Any
) -> bool:
    schema = {"type": "object", "properties": properties, "required": [*required], **more}
    format = calls({"name": "f", "schema": schema}, form=PARAMETERS)
    return await accepts(constraints, format, text)


async def test_parameters_are_texts_or_json_in_their_order(constraints: FormatCompiler) -> None:
    properties = {"a": TEXT_VALUE, "n": {"type": "integer"}, "o": {"type": "object"}}
    a, n, o = given("a", "Oslo"), given("n", "3"), given("o", '{"x": [1, null]}')
    for text in (in_form(a), in_form(a, n), in_form(a, o), in_form(a, n, o)):
        assert await accepts_parameters(constraints, properties, "a", text=text), text
    for text in (in_form(n), in_form(n, a), in_form(a, a), in_form(a, given("n", "three"))):
        assert not await accepts_parameters(constraints, properties, "a", text=text), text


@pytest.mark.parametrize(
    "value", ["", '"', "a\nb\n", "</parameter>", "x\n</parameter> y", "\n</function>", "größer 🙂"]
)
async def test_any_text_up_to_its_end_is_a_value(constraints: FormatCompiler, value: str) -> None:
    text = in_form(given("a", value))
    if value.startswith("</parameter>"):
        assert not await accepts_parameters(constraints, {"a": TEXT_VALUE}, text=text)
        return
    assert await accepts_parameters(constraints, {"a": TEXT_VALUE}, text=text)
    reader = CallReader(replace(PARAMETERS, texts={"f": {"a"}}))
    pieces = [piece for letter in text for piece in reader.push(letter)]
    written = "".join(piece.text for piece in pieces if isinstance(piece, Arguments))
    assert (json.loads(written), reader.is_complete) == ({"a": value}, True)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": ["C", "é"]}, ("C", "é"), ("F", '"C"')),
        ({"type": "string", "const": "x"}, ("x",), ("y",)),
        ({**TEXT_VALUE, "maxLength": 300}, ("", "x" * 300), ("x" * 301,)),
        ({**TEXT_VALUE, "minLength": 2, "maxLength": 3}, ("ab", "abc"), ("a", "abcd")),
        ({**TEXT_VALUE, "pattern": "^[a-z]+$"}, ('"ab"',), ("ab", '"1"')),
        ({"type": ["string", "null"]}, ('"ab"', "null"), ("ab",)),
        ({"$ref": "#/$defs/text"}, ("ab",), ("abcd",)),
        ({"type": "array", "items": {"$ref": "#/$defs/text"}}, ('["ab"]',), ('["abcd"]', "ab")),
    ],
)
async def test_value_follows_its_schema(
    constraints: FormatCompiler, schema: Any, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    shared = {"$defs": {"text": {**TEXT_VALUE, "maxLength": 3}}}
    for value in (*good, *bad):
        text = in_form(given("a", value))
        found = await accepts_parameters(constraints, {"a": schema}, "a", text=text, **shared)
        assert found == (value in good), value


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "pattern": "^(?=a)b$"}, "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"type": "string", "format": "idn-email"}, "format: idn-email"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf: "),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "Unsatisfiable"),
        ({"not": {}}, "not: "),
    ],
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_refused_function_is_named(form: CallForm, schema: Any, reason: str) -> None:
    """The fault is found by either: our own reading of the schema, or the library's."""
    bad = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    named = {"name": "bad", "schema": bad}
    format = calls(NOTHING, named, ANYTHING_LISTED, most=2, form=form).model_dump()
    refused = answer(format, vocabulary())["refused"]
    assert refused.startswith("bad: ") and reason in refused


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "object", "properties": {"a": TEXT_VALUE}, "minProperties": 1}, "minProperties"),
        ({"type": "object", "additionalProperties": TEXT_VALUE}, "additionalProperties"),
        ({"type": "object", "properties": {"a>": TEXT_VALUE}}, "properties"),
        ({"type": "object", "properties": {"a": TEXT_VALUE}, "required": ["b"]}, "required"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, r"\$ref"),
    ],
)
async def test_schema_that_is_no_list_of_parameters_is_refused(
    constraints: FormatCompiler, schema: Any, keyword: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"f: {keyword}"):
        await start(constraints, calls({"name": "f", "schema": schema}, form=PARAMETERS))
