"""What comes as a response and what is answered: bodies, items, and what is kept of them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import orjson
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)
from typing_extensions import TypedDict

from model.chat import TAGGED
from server.api.chat.calls import ChosenFunction, kind_of_choice
from server.api.chat.messages import (
    CACHE_MARK,
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    FunctionDefinition,
    FunctionName,
    HeldRefusal,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    functions_alone,
)
from server.api.chat.prepare import Effort
from server.api.openai.bodies import HARMLESS, OTHER_NAMES, REASONING, RESPONSES, Labels
from server.api.schemas import requests as schemas
from server.api.schemas.requests import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    RegexFormat,
    TextFormat,
    few_fields,
)
from server.api.schemas.wire import History, ItemId, Label, ModelName, Refusal, StateName, Wire
from server.models.service import ID_BYTES, LOGPROB_BYTES, TOKEN_BYTES

# -------------------------------------------------------------------------------------------------
# The body of `POST /v1/responses`, of ``response.create`` on its socket, and what is answered.

MAX_ITEMS = 10_000
MAX_PARTS = 1024
MAX_TOOLS = 128

ItemStatus = Literal["in_progress", "completed", "incomplete"]
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


Metadata = Annotated[
    dict[MetadataKey, MetadataValue], Field(max_length=16), BeforeValidator(few_fields)
]


# Input


class InputText(Wire):
    """Text of the user's, the developer's or a tool's."""

    hints = CACHE_MARK

    type: Literal["input_text"]
    text: str


class OutputText(History):
    """Text of the assistant's, as an earlier answer had it."""

    type: Literal["output_text"]
    text: str


Part = Annotated[InputText | OutputText | HeldRefusal, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]
TextParts = Annotated[list[InputText], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputMessage(Wire):
    """What the user or the developer of an application has said."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: str | Parts
    id: ItemId | None = None
    status: ItemStatus | None = None


class InputAnswer(History):
    """What the assistant has said, as a client holds it."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: str | Parts
    id: ItemId | None = None


class InputCall(History):
    """A call that the assistant has made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: FunctionName
    arguments: str | None
    id: ItemId | None = None


class InputCallOutput(History):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | TextParts
    id: ItemId | None = None


class ReasoningText(History):
    """What was thought."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(History):
    """What was thought before an answer; without its text it is another server's."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = (
        None
    )
    id: ItemId | None = None


class ItemReference(Wire):
    """An item of a stored response, of its input or its output, by its name."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _kind(item: Any) -> str:
    """A message may come without its type, and so may a reference."""

    def field(name: str) -> Any:
        return item.get(name) if isinstance(item, dict) else getattr(item, name, None)

    kind = field("type")
    if kind is None and field("role") is None and field("id") is not None:
        return "item_reference"
    if kind in (None, "message"):
        return "answer" if field("role") == "assistant" else "message"
    return str(kind)


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputAnswer, Tag("answer")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="input_item",
        custom_error_message="items must be message, function_call, function_call_output, "
        "reasoning or item_reference",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


# Output


class NamedSchema(JsonSchema):
    """JSON of one schema. It is always followed, strict or not."""

    type: Literal["json_schema"]


Format = Annotated[
    TextFormat | JsonObjectFormat | NamedSchema | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]


class TextConfig(Wire):
    """What the text looks like."""

    hints = frozenset({"verbosity"})

    format: Format | None = None


class ResponseTool(FunctionDefinition):
    """A function of the client's that the model may call; arguments always follow the schema."""

    hints = frozenset()

    type: Literal["function"]


class ResponseToolChoice(ChosenFunction):
    """The function that must be called."""

    type: Literal["function"]


class ResponseAllowedTools(Wire):
    """Those of the tools that may be called, or with ``required`` must; the model knows all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[ResponseToolChoice], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)
    ]


Tools = Annotated[
    list[ResponseTool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    *functions_alone(ResponseTool.model_construct()),
]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[ResponseToolChoice, Tag("named")]
    | Annotated[ResponseAllowedTools, Tag("allowed")],
    Discriminator(kind_of_choice),
]


class ResponseStreamOptions(Wire):
    """OpenAI's options of a stream; random padding is not among what this server does."""

    include_obfuscation: schemas.OnlyFalse | None = None


LOGPROBS = "message.output_text.logprobs"

#: What else OpenAI's clients ask for belongs to items that this server never makes.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Includes = Annotated[list[Included], Field(fail_fast=True, max_length=16)]


class ResponseReasoning(Wire):
    """How much the model thinks."""

    refused: ClassVar = REASONING

    effort: Effort | None = None


class ResponsesBody(schemas.Drawing, schemas.Once, Labels):
    """`POST /v1/responses`."""

    refused: ClassVar = RESPONSES
    hints = HARMLESS - {"store", "metadata"}
    other_names = OTHER_NAMES

    model: ModelName | None = None
    input: Annotated[str, StringConstraints(min_length=1)] | Items
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Includes | None = None
    text: TextConfig | None = None
    reasoning: ResponseReasoning | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: schemas.SomeTokens | None = None
    return_token_ids: bool | None = None
    state: StateName | None = None


class ResponseCreate(ResponsesBody):
    """``response.create``: the same over a socket, where everything streams.

    What has one ``stream_id`` is done in order; other streams continue meanwhile.
    """

    refused: ClassVar = {
        **RESPONSES,
        "background": Refusal("is for HTTP: a socket is there to be read", (False,)),
        "generate": Refusal("the state is kept after each turn: nothing needs warming up", (True,)),
    }

    type: Literal["response.create"]
    stream: schemas.OnlyTrue | None = None
    background: schemas.OnlyFalse | None = None
    idempotency_key: None = None
    stream_id: Label | None = None


# -------------------------------------------------------------------------------------------------
# What `/v1/responses` answers, as OpenAPI describes it: dictionaries that orjson writes.


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class CachedInput(TypedDict):
    """Tokens of the input that the session had read before."""

    cached_tokens: int
    cache_write_tokens: int


class Reasoning(TypedDict):
    """Tokens of the thinking, with its markers."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of one response; the input is all of the text before it."""

    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: Reasoning
    total_tokens: int


class ResponseFailure(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class ResponseCut(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    """OpenAI's ``response``, with its session and its seed."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    background: bool
    error: ResponseFailure | None
    incomplete_details: ResponseCut | None
    instructions: str | None
    max_output_tokens: int
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    session: str | None
    seed: int
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class ResponseDeleted(TypedDict):
    """A deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    """Some of the items that a response was asked."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


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
_REASONING_ITEM: Json = {"type": "reasoning", "status": "completed", "summary": []}

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
        return {"id": item.id or f"rs_{name}", **_REASONING_ITEM, "content": parts}
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
