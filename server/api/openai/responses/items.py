"""Input items of a response, and what is kept of it apart from its session."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from model.chat import TAGGED
from server.api.chat.messages import (
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    HeldRefusal,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from server.api.openai.responses.schemas import (
    InputAnswer,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    InputText,
    ItemReference,
    OutputText,
)
from server.models.service import ID_BYTES, LOGPROB_BYTES, TOKEN_BYTES

# -------------------------------------------------------------------------------------------------
# What is kept of a response apart from its session: what was asked for, to be told again.
#
# It lies in the store with the request itself, under the response's id, in the one
# transaction that begins the work. What the model has written is in the session's
# log, and nowhere else.


Json = dict[str, Any]

ID_PREFIX = "resp_"


@dataclass(frozen=True, slots=True)
class Note:
    """``fields`` are those of the response object that never change, ``items`` its input.

    ``tools`` are those that the model was told of, as its template reads them.
    ``may_call``: its text may be calls of theirs. ``logprobs``: those of the output
    are shown. ``apart``: its prompt ends with markers of thinking, which no later one has.
    ``state`` is the named state that its conversation begins with, ``call_form`` the name of the
    form of its calls. ``prompt_ids`` are the tokens that it reads, where they and those of the
    output are shown. ``must_call``: its template was told that the answer must be a call.
    """

    id: str
    fields: Json = field(repr=False)
    items: list[Json] = field(repr=False)
    tools: list[Json] = field(default_factory=list, repr=False)
    may_call: bool = False
    logprobs: bool = False
    apart: bool = False
    state: str | None = None
    call_form: str = TAGGED.name
    prompt_ids: Sequence[int] | None = field(default=None, repr=False)
    must_call: bool = False

    def packed(self) -> str:
        """For `unpacked`."""
        return orjson.dumps(self, list).decode()  # of the ids

    @classmethod
    def unpacked(cls, text: str) -> Note:
        """The note that `packed` has written."""
        return cls(**orjson.loads(text))

    @property
    def num_bytes(self) -> int:
        """What the response may take, by what was asked for."""
        num_entries = 1 + (self.fields.get("top_logprobs") or 0) if self.logprobs else 0
        per_id = 0 if self.prompt_ids is None else ID_BYTES
        per_token = TOKEN_BYTES + num_entries * LOGPROB_BYTES + per_id
        of_prompt = len(self.prompt_ids or ()) * per_id
        return of_prompt + (self.fields.get("max_output_tokens") or 0) * per_token

    def item_id(self, kind: str, index: int) -> str:
        """The name of an item of its output, the same whenever it is read."""
        return f"{kind}_{self.id.removeprefix(ID_PREFIX)}_{index}"


def new_id() -> str:
    """Of a response: unguessable."""
    return ID_PREFIX + secrets.token_hex(24)


def id_under_key(store: str, owner: str, key: str) -> str:
    """The id of what ``owner`` asks for under its own ``key``, so that it is found again."""
    named = f"{store}\0{owner}\0{key}"
    return ID_PREFIX + hashlib.sha256(named.encode()).hexdigest()[:48]


# -------------------------------------------------------------------------------------------------
# Input items as they are kept and shown, and what a chat template reads instead.


#: What all items of thinking have.
REASONING: Json = {"type": "reasoning", "status": "completed", "summary": []}

Said = InputMessage | InputAnswer
Given = Said | InputCall | InputCallOutput | InputReasoning | ItemReference


def input_items(
    given: str | Sequence[Given], response: str, found: Mapping[str, Json]
) -> list[Json]:
    """``given`` in the one shape that OpenAI shows it in; an item without a name gets one.

    ``found`` has the items that are referred to. Thinking without its text is left out.
    """
    if isinstance(given, str):
        given = [InputMessage(role="user", content=given)]
    name = response.removeprefix(ID_PREFIX)
    return [
        found[item.id] if isinstance(item, ItemReference) else _item(item, f"{name}_in_{index}")
        for index, item in enumerate(given)
        if not isinstance(item, InputReasoning) or item.content
    ]


def _item(item: Said | InputCall | InputCallOutput | InputReasoning, name: str) -> Json:
    if isinstance(item, InputReasoning):
        parts = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
        return {"id": item.id or f"rs_{name}", **REASONING, "content": parts}
    if isinstance(item, Said):
        head: Json = {"id": item.id or f"msg_{name}", "type": "message", "role": item.role}
        return {**head, "status": "completed", "content": _content(item)}
    head = {"type": item.type, "status": "completed", "call_id": item.call_id}
    if isinstance(item, InputCall):
        return {"id": item.id or f"fc_{name}", **head} | {
            "name": item.name,
            "arguments": item.arguments or "",
        }
    text = item.output if isinstance(item.output, str) else _joined(p.text for p in item.output)
    return {"id": item.id or f"fco_{name}", **head, "output": text}


def _content(message: Said) -> list[Json]:
    if isinstance(message.content, str):
        return [_part(message.role, message.content)]
    return [_part(message.role, _text(part)) for part in message.content]


def _part(role: str, text: str) -> Json:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _text(part: InputText | OutputText | HeldRefusal) -> str:
    return part.refusal if isinstance(part, HeldRefusal) else part.text


def _joined(texts: Iterable[str]) -> str:
    """Parts become lines, as in a chat."""
    return "\n".join(texts)


def chat_messages(items: Iterable[Json]) -> list[ChatMessage]:
    """What a template reads of input and output items.

    Calls belong to the message before them, and thinking to what comes after it; thinking that
    was cut is a message without a word.
    """
    messages: list[ChatMessage] = []
    for item in items:
        _add(messages, item)
    return messages


def _add(messages: list[ChatMessage], item: Json) -> None:
    if item["type"] == "reasoning":
        thought = _joined(part["text"] for part in item["content"])
        messages.append(AssistantMessage(role="assistant", reasoning_content=thought))
    elif item["type"] == "function_call":
        _add_call(messages, item)
    elif item["type"] == "function_call_output":
        message = ToolMessage(role="tool", content=item["output"], tool_call_id=item["call_id"])
        messages.append(message)
    else:
        text = _joined(part["text"] for part in item["content"])
        last = messages[-1] if messages else None
        if item["role"] == "assistant" and isinstance(last, AssistantMessage) and _is_thought(last):
            messages[-1] = last.model_copy(update={"content": text})
        else:
            messages.append(_message(item["role"], text))


def _is_thought(message: AssistantMessage) -> bool:
    """Whether nothing is in it yet but thinking."""
    return message.content is None and not message.tool_calls


def _message(role: str, text: str) -> ChatMessage:
    if role == "assistant":
        return AssistantMessage(role="assistant", content=text)
    if role == "user":
        return UserMessage(role="user", content=text)
    return SystemMessage(role="developer" if role == "developer" else "system", content=text)


def _add_call(messages: list[ChatMessage], item: Json) -> None:
    function = CalledFunction(name=item["name"], arguments=item["arguments"])
    call = ToolCall(id=item["call_id"], type="function", function=function)
    last = messages[-1] if messages else None
    if not isinstance(last, AssistantMessage):
        messages.append(AssistantMessage(role="assistant", tool_calls=[call]))
    elif last.tool_calls is None:
        messages[-1] = last.model_copy(update={"tool_calls": [call]})
    else:
        last.tool_calls.append(call)  # a list of this message's own, however long it gets
