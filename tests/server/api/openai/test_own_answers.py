"""What the server wrote can be sent back, wherever it was cut and whatever template reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

import orjson
import pytest

from model.chat import FENCED, JSON_LIST, LISTED, PARAMETERS, TAGGED, CallForm, ChatTemplate
from model.families.lfm2.chat import TEMPLATE as LFM2
from model.families.qwen35.chat import TEMPLATE as OUR_QWEN35
from model.families.rwkv7.chat import CHAT_ML as ARWKV7
from server.api.chat.calls import with_texts
from server.api.chat.messages import ChatMessage
from server.api.chat.prompt import prompt_of
from server.api.openai.chat import ChatBody, ChatWriter
from server.api.openai.responses.events import ResponseWriter
from server.api.openai.responses.items import Note, ResponsesBody, chat_messages, input_items
from server.api.schemas.wire import parse_body
from server.chat.renderer import Rendered
from server.chat.sandbox import answer
from server.engine.types import Event, Finished, Request, SamplingParams, Started, TokenEvent, Usage
from server.errors import InvalidRequest
from server.models.service import Service
from tests.fakes import MODEL, ByteTokenizer
from tests.server.api.openai.rwkv_templates import PUBLISHED
from tests.server.api.openai.test_chat_tools import LFM25, QWEN35
from tests.server.api.openai.test_conversation import IM, Talker
from tests.server.api.openai.thinking import WORLD
from tests.server.chat.test_marks import CHAT

Json = dict[str, Any]

#: Whose messages must be texts, and whose arguments objects; others check nothing of that.
STRICT = """\
{%- for message in messages %}
{{- message.role + ': ' + message.content + '\\n' }}
{%- for call in message.tool_calls or [] %}
{{- call.function.name }}
{%- for name, value in call.function.arguments.items() %}
{{- ' ' + name + '=' + value | tojson }}
{%- endfor %}
{%- endfor %}
{%- endfor %}
"""

TEMPLATES = {
    "plain": ChatTemplate(),
    "qwen35": ChatTemplate(OUR_QWEN35),
    "qwen35's own": ChatTemplate(QWEN35),
    "lfm2": ChatTemplate(LFM2, special_tokens={"bos_token": ""}),
    "lfm2.5": ChatTemplate(LFM25),
    "arwkv7": ChatTemplate(ARWKV7),
    "world": WORLD,
    "chatml": ChatTemplate(IM),
    "strict": ChatTemplate(STRICT),
    **{name: ChatTemplate(source) for name, source in PUBLISHED.items()},
}

ASKED: Json = {"role": "user", "content": "hi"}
NEXT: Json = {"role": "user", "content": "And now?"}

ARGUMENTS: Json = {"place": 'Ås "a"\n', "days": 10**30, "list": [1.5, None, {"a": True}]}
IN_PARAMETERS = "".join(
    f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
    for name, value in ARGUMENTS.items()
)
LIST = '[look(place="a", days=1, list=[True, None]), wait()]'
OBJECT = f'{{"name": "look", "arguments": {json.dumps(ARGUMENTS)}}}'
CALLS = [
    (TAGGED, f"{TAGGED.begin}look{TAGGED.middle}{json.dumps(ARGUMENTS)}{TAGGED.end}"),
    (FENCED, f"{FENCED.begin}look{FENCED.middle}{json.dumps(ARGUMENTS)}{FENCED.end}"),
    (PARAMETERS, f"{PARAMETERS.begin}look{PARAMETERS.middle}{IN_PARAMETERS}{PARAMETERS.end}"),
    (LISTED, f"<|tool_call_start|>{LIST}<|tool_call_end|>"),
    (JSON_LIST, f'<TOOLCALL>[{OBJECT}, {{"name": "wait", "arguments": {{}}}}]</TOOLCALL>'),
]
TOOL: Json = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"place": {"type": "string"}}}},
}


class InProcess:
    """Renders as the sandbox does, without its process."""

    async def render(
        self,
        source: str,
        variables: Mapping[str, object],
        others: Sequence[Mapping[str, object]],
        owner: str,
    ) -> Rendered:
        given, more = json.loads(json.dumps([variables, others]))
        found = answer(source, given, more, max_chars=1 << 20, now_s=0.0)
        if "error" in found:
            raise InvalidRequest(found["error"])
        return Rendered(found["text"], found["shared"])


def events_of(text: str, thought: str) -> list[Event]:
    """Of an answer that was cut, a token for each letter."""
    size = len(thought) + len(text)
    letters = [*(("", letter) for letter in thought), *((letter, None) for letter in text)]
    return [
        Started("r", "sess_1", 0),
        *(
            TokenEvent("r", seq, seq, 65, shown, thought=thinking)
            for seq, (shown, thinking) in enumerate(letters, 1)
        ),
        Finished("r", "sess_1", size + 1, size, "", "length", Usage(1, size)),
    ]


def chat_writer(calls: CallForm | None) -> ChatWriter:
    request = Request("r", "me", (1,), SamplingParams(), start=False)
    return ChatWriter(request, MODEL, 0, calls=calls)


def whole(events: list[Event], calls: CallForm | None) -> Json:
    """The message of an answer that is not streamed."""
    writer = chat_writer(calls)
    for event in events:
        writer.add(event)
    message: Json = json.loads(b"".join(writer.whole()))["choices"][0]["message"]
    return message


def streamed(events: list[Event], calls: CallForm | None) -> Json:
    """The message that OpenAI's clients put together from a stream."""
    writer = chat_writer(calls)
    message: Json = {}
    for line in b"".join(map(writer.chunks, events)).decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        for call in delta.pop("tool_calls", ()):
            known = message.setdefault("tool_calls", [])
            if call["index"] == len(known):
                known.append(call)
            else:
                known[-1]["function"]["arguments"] += call["function"]["arguments"]
        for name, value in delta.items():
            before = message.get(name)
            message[name] = before + value if isinstance(before, str) else value
    return message


def items(events: list[Event], calls: CallForm | None) -> list[Json]:
    """The output of a response."""
    fields = {"store": True, "tools": [], "background": False}
    note = Note("resp_1", fields, [], [TOOL], calls is not None, call_form=(calls or TAGGED).name)
    writer = ResponseWriter(note, ByteTokenizer())
    for event in events:
        writer.write(event)
    output: list[Json] = json.loads(orjson.dumps(writer.response()["output"]))
    return output


def cuts() -> Iterator[tuple[str, str, CallForm | None]]:
    """Text, thinking and form of every answer that may end at any letter."""
    yield "", "", None
    yield "Hello.", "", None
    yield "", "Well", None
    yield "Hello.", "Well", None
    for form, text in CALLS:
        form = with_texts(form, [TOOL])
        for end in range(len(text) + 1):
            yield text[:end], "", form
        yield text, "Well", form


@cache
def histories() -> list[list[ChatMessage]]:
    """One conversation with all of these answers, as chats and as Responses have it."""
    messages, given = [ASKED], [ASKED]
    for text, thought, form in cuts():
        events = events_of(text, thought)
        for message in (whole(events, form), streamed(events, form)):
            messages += [message, NEXT]
        given += [*items(events, form), NEXT]
    chat = parse_body(ChatBody, json.dumps({"messages": messages}).encode())
    response = parse_body(ResponsesBody, json.dumps({"input": given}).encode())
    return [chat.messages, chat_messages(input_items(response.input, "resp_1", {}))]


@pytest.mark.parametrize("name", TEMPLATES)
def test_answer_cut_anywhere_can_be_sent_back(name: str) -> None:
    talker = cast("Service", Talker(TEMPLATES[name], cast(Any, InProcess())))
    for history in histories():
        ids = asyncio.run(prompt_of(talker, history)).ids
        num_turns = sum(message.role == "user" for message in history)
        assert b"".join(map(CHAT.token_bytes, ids)).count(b"And now?") == num_turns - 1 > 400


#: Arguments of a history, and what a template that reads items shows of them.
SHOWN = [
    (json.dumps({"a": 1, "b": "x"}), {"a": 1, "b": "x"}),
    ('{"a": 100000000000000000000}', {"a": 100000000000000000000}),
    ('{"a": 1, "b": "x', {"a": 1, "b": "x"}),
    ('{"a": [1, {"b": "', {"a": [1, {"b": ""}]}),
    ('{"a": 1, "b', {"a": 1}),
    ('{"a": ', {}),
    ("{", {}),
    ("", {}),
    (" ", {}),
    ("null", {}),
    (None, {}),
]
#: What is no object: such a template has nothing to show of it.
NO_OBJECTS = ["[1]", "5", '"x"', "a=1", '{"a": ' + "[" * 70 + "]" * 70 + "}", '{"a": "\\ud800"}']


def text_of(source: str, arguments: str | None) -> str:
    call: Json = {"id": "c", "function": {"name": "look", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    talker = Talker(ChatTemplate(source), cast(Any, InProcess()))
    return asyncio.run(talker.text([ASKED, said, NEXT]))


@pytest.mark.parametrize(("arguments", "shown"), SHOWN)
def test_arguments_are_shown_as_far_as_they_go(arguments: str | None, shown: Json) -> None:
    items = "".join(f" {name}={json.dumps(value)}" for name, value in shown.items())
    assert f"\nlook{items}user: " in text_of(STRICT, arguments)
    assert f'{{"name": "look", "arguments": {json.dumps(shown)}}}' in text_of(IM, arguments)


@pytest.mark.parametrize("arguments", NO_OBJECTS)
def test_arguments_that_are_no_object_are_text_or_nothing(arguments: str) -> None:
    assert "\nlookuser: " in text_of(STRICT, arguments)
    shown = json.dumps(arguments)
    assert f'{{"name": "look", "arguments": {shown}}}' in text_of(IM, arguments)


def test_what_a_template_says_of_other_things_is_told() -> None:
    with pytest.raises(InvalidRequest, match="no such turn"):
        text_of("{{ raise_exception('no such turn') }}", "[1]")
