"""Input items as they are kept and shown, and what a chat template reads instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from server.api.openai.chat.messages import (
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    HeldRefusal,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from server.api.openai.responses.note import ID_PREFIX, Json
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
