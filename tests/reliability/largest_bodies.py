"""The largest bodies that each route takes, made to be slow: fields repeated, nested, and alike.

They fill what a client can fill, and put its fields against each other wherever the server may look
for one text in another. `test_40_event_loop` fails for a route without a row in `BODIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: `max_body_bytes` and `max_message_bytes`.
LIMIT = 1 << 20
#: What is left for one field, and for one of three.
ROOM = LIMIT - 4096
THIRD = ROOM // 3

#: All characters that may mark a special token's name, but for a few.
MARKS = "".join(map(chr, range(0xE000, 0xF8F0)))
TEXTS = {
    "letters": "a" * ROOM,
    "spaces": " " * (ROOM - 1) + "a",
    "special names": "<|endoftext|>" * (ROOM // 13),
    "beginnings of names": "<|" * (ROOM // 2),
    "marks": "a" * (ROOM - 3 * len(MARKS)) + MARKS,
    "emoji": "\U0001f600" * (ROOM // 4),
    "escapes": "\\" * (ROOM // 2),
}
IDS = [97] * THIRD
FEW = {"max_tokens": 1}
#: Of a body that the route does not look at.
ANY_STATUS = 0


@dataclass(frozen=True)
class Sent:
    """A body of JSON, and the status of its answer."""

    name: str
    body: Mapping[str, Any]
    status: int = 200

    @property
    def data(self) -> bytes:
        """At most `LIMIT` bytes."""
        data = json.dumps(self.body, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(data) <= LIMIT, (self.name, len(data))
        return data


def _each_text(field: str, **others: Any) -> list[Sent]:
    return [Sent(f"{field}: {kind}", {field: text, **others}) for kind, text in TEXTS.items()]


def _said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _calls(*arguments: str) -> dict[str, Any]:
    functions = [{"name": "f", "arguments": text} for text in arguments]
    calls = [{"id": "c", "type": "function", "function": function} for function in functions]
    return _said("a", "assistant", tool_calls=calls)


def _object(kind: Mapping[str, Any], number: int, **more: Any) -> dict[str, Any]:
    properties = {f"p{index}": kind for index in range(number)}
    return {"type": "object", "properties": properties, **more}


HI = [_said("hi")]
OPEN = {"continue_final_message": True, "add_generation_prompt": False}
#: What chats and tokens are made of.
MESSAGES: dict[str, dict[str, Any]] = {
    "a text in the arguments behind it": {
        "messages": [{**_calls("a" * (2 * THIRD)), "content": "ab" + "a" * THIRD}],
        **OPEN,
    },
    "a text among spaces": {
        "messages": [_said(" " * THIRD + "a" * THIRD + " " * THIRD, "assistant")],
        **OPEN,
    },
    "a question in its answer": {"messages": [_said("a" * THIRD), _said("a" * THIRD, "assistant")]},
    **{
        f"beginnings of names as {field}": {
            "messages": [_said("", "assistant", **{field: TEXTS["beginnings of names"]}), *HI]
        }
        for field in ("reasoning_content", "refusal")
    },
    "many messages": {"messages": [_said("a")] * 4096},
    "many parts": {"messages": [_said([{"type": "text", "text": "a"}] * 4000)] * 8},
    "many calls": {"messages": [_calls(*["{}"] * 128)] * 100},
    "many values in arguments": {"messages": [_calls('{"a":[0' + ",0" * (ROOM // 2 - 99) + "]}")]},
    "many lists": {"messages": HI, "chat_template_kwargs": {"x": [[]] * THIRD}},
    "many texts": {"messages": HI, "chat_template_kwargs": {"x": ["a"] * (ROOM // 4)}},
    "many names": {
        "messages": HI,
        "chat_template_kwargs": {"x": {f"{index:x}": 0 for index in range(ROOM // 11)}},
    },
} | {
    f"{field} of {kind}": body
    for kind, text in TEXTS.items()
    for field, body in {
        "a message": {"messages": [_said(text)]},
        "variables": {"messages": HI, "chat_template_kwargs": {"x": text}},
    }.items()
}
#: Too large for a grammar, which is found out in a child process.
FUNCTIONS = {
    "many properties": [_object({"type": "string", "enum": ["a"]}, 180)] * 128,
    "references": [_object({"$ref": "#/$defs/a"}, 240, **{"$defs": {"a": {"$ref": "#/$defs/a"}}})]
    * 128,
}
ITEMS = {
    "many calls": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}],
    "many messages": [_said("a")],
    "many parts": [_said([{"type": "input_text", "text": "a"}] * 900)],
}
ECHO = {"echo": True, **FEW}
#: For routes that read no JSON, or no body at all.
ANY = Sent("a text", {"text": TEXTS["letters"]}, ANY_STATUS)
UNKNOWN = Sent("unknown fields", {f"f{index}": 1 for index in range(80_000)}, 400)


def _tools(schemas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": f"f{index}", "parameters": each} for index, each in enumerate(schemas)]


def _chats() -> list[Sent]:
    found = [Sent(name, {**body, **FEW}) for name, body in MESSAGES.items()]
    for name, schemas in FUNCTIONS.items():
        tools = [{"type": "function", "function": each} for each in _tools(schemas)]
        found.append(Sent(f"tools: {name}", {"messages": HI, "tools": tools}, 400))
    expected = {"type": "content", "content": TEXTS["letters"]}
    found.append(Sent("a prediction", {"messages": HI, "prediction": expected, **FEW}))
    return found


def _completions() -> list[Sent]:
    stops = [("a" * 255 + str(index))[-256:] for index in range(10)]
    return [
        *_each_text("prompt", **FEW),
        Sent("ids that are shown", {"prompt": IDS, "return_token_ids": True, **ECHO}),
        Sent(
            "a stream that repeats a text",
            {"prompt": "\1" * (ROOM // 6), "n": 15, "stream": True, **ECHO},
        ),
        Sent("a stream of a long text", {"prompt": TEXTS["escapes"], "stream": True, **ECHO}),
        Sent("many prompts", {"prompt": ["a" * 4000] * 256, **FEW}),
        Sent("many lists", {"prompt": [[97] * 1300] * 256, **FEW}),
        Sent("stops in the text", {"prompt": TEXTS["letters"], "stop": stops, "max_tokens": 300}),
    ]


def _responses() -> list[Sent]:
    few = {"max_output_tokens": 1}
    found = [
        *_each_text("input", **few),
        *_each_text("instructions", input="hi", **few),
        Sent("a stream of ids", {"input": "a" * ROOM, "return_token_ids": True, "stream": True}),
    ]
    for name, items in ITEMS.items():
        number = min(10_000, ROOM // len(json.dumps(items)))
        found.append(Sent(name, {"input": items * number, **few}))
    tools = [{"type": "function", **each} for each in _tools(FUNCTIONS["references"])]
    return [*found, Sent("tools", {"input": "hi", "tools": tools}, 400)]


def _messages() -> list[Sent]:
    few = {"max_tokens": 1}
    block = {"type": "text", "text": "a"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block] * 900}
    found = [
        Sent(f"a message of {kind}", {"messages": [_said(text)], **few})
        for kind, text in TEXTS.items()
    ]
    found += [
        Sent(f"the system of {kind}", {"messages": HI, "system": text, **few})
        for kind, text in TEXTS.items()
    ]
    several = {
        "many messages": [_said("a")] * 4096,
        "many blocks": [_said([block] * 4000)] * 7,
        "many calls": [_said([call] * 4000, "assistant")] * 4,
        "many results": [_said([result] * 30)],
    }
    found += [Sent(name, {"messages": turns, **few}) for name, turns in several.items()]
    values = {**call, "input": {"a": [0] * (ROOM // 2 - 99)}}
    found.append(Sent("many values", {"messages": [*HI, _said([values], "assistant")], **few}))
    schemas = FUNCTIONS["references"]
    tools = [{"name": f"f{index}", "input_schema": each} for index, each in enumerate(schemas)]
    return [*found, Sent("tools", {"messages": HI, "tools": tools, **few}, 400)]


FAKE = "fake"


def _ollama_chats() -> list[Sent]:
    few = {"model": FAKE, "options": {"num_predict": 1}}
    call = {"function": {"name": "f", "arguments": {}}}
    several = {
        "a text": [_said(TEXTS["letters"])],
        "marks": [_said(TEXTS["marks"])],
        "many messages": [_said("a")] * 4096,
        "many calls": [_said("", "assistant", tool_calls=[call] * 128)] * 150,
        "many results": [
            _said("", "assistant", tool_calls=[call] * 128),
            *[_said("a", "tool", tool_name="f")] * 4000,
        ],
    }
    values = {"function": {"name": "f", "arguments": {"a": [0] * (ROOM // 2 - 99)}}}
    several["many values"] = [*HI, _said("", "assistant", tool_calls=[values])]
    return [Sent(name, {"messages": turns, **few}, ANY_STATUS) for name, turns in several.items()]


#: By method and path; that of a socket is "SOCKET".
BODIES: dict[str, list[Sent]] = {
    "POST /v1/chat/completions": _chats(),
    "POST /v1/completions": _completions(),
    "POST /v1/messages": _messages(),
    "POST /v1/messages/count_tokens": [
        Sent("a text", {"messages": [_said(TEXTS["letters"])]}),
        Sent("many blocks", {"messages": [_said([{"type": "text", "text": "a"}] * 4000)] * 7}),
    ],
    "POST /v1/responses": _responses(),
    "POST /v1/responses/{response_id}/cancel": [ANY],
    "POST /v1/embeddings": [
        *_each_text("input"),
        Sent("many texts", {"input": ["a" * 500] * 2048}),
    ],
    "POST /v1/score": [
        Sent("texts", {"prompt": "a" * THIRD, "continuations": ["a" * 2000] * 256}),
        Sent("ids", {"prompt": [97] * 600, "continuations": [[97] * 600] * 256}),
    ],
    "POST /tokenize": [
        *_each_text("prompt", return_token_strs=True),
        Sent("messages", MESSAGES["a text in the arguments behind it"]),
    ],
    "POST /detokenize": [Sent("ids", {"tokens": IDS})],
    "POST /completion": [*_each_text("prompt", n_predict=1), Sent("ids", {"prompt": IDS, **FEW})],
    "POST /infill": [UNKNOWN],
    "POST /apply-template": [Sent("messages", MESSAGES["a text among spaces"], ANY_STATUS)],
    "POST /api/chat": _ollama_chats(),
    "POST /api/generate": [
        *_each_text("prompt", model=FAKE, raw=True, options={"num_predict": 1}),
        *_each_text("system", model=FAKE, prompt="a", options={"num_predict": 1}),
    ],
    "POST /api/embed": [
        *_each_text("input", model=FAKE),
        Sent("many texts", {"model": FAKE, "input": ["a" * 500] * 2048}),
    ],
    "POST /api/embeddings": _each_text("prompt", model=FAKE),
    "POST /api/show": [UNKNOWN],
    **{f"POST /api/{name}": [ANY] for name in ("pull", "create", "copy", "push")},
    "POST /v1/sessions": [UNKNOWN],
    "POST /v1/sessions/import": [ANY],
    "POST /v1/sessions/{session}/append": [*_each_text("text"), Sent("ids", {"tokens": IDS})],
    "POST /v1/sessions/{session}/fork": [UNKNOWN],
    "POST /v1/sessions/{session}/rewind": [UNKNOWN],
    "POST /v1/sessions/{session}/cancel": [ANY],
    "POST /v1/admin/models": [UNKNOWN],
    "POST /v1/admin/models/{name}/reload": [UNKNOWN],
    "POST /v1/admin/states": [ANY],
    "POST /v1/admin/rebalance": [UNKNOWN],
    "SOCKET /v1/stream": [
        *_each_text("prompt", type="generate", request_id="r", **FEW),
        Sent("unknown fields", {"type": "generate", "request_id": "r", **UNKNOWN.body}, 400),
    ],
    "SOCKET /v1/responses": [
        Sent(each.name, {"type": "response.create", **each.body, "stream": True}, each.status)
        for each in _responses()
        if "tools" not in each.body
    ],
}
