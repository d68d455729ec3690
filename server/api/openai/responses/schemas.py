"""The body of `POST /v1/responses`, of ``response.create`` on its socket, and what is answered."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)
from typing_extensions import TypedDict

from server.api.chat.calls import ChosenFunction, kind_of_choice
from server.api.chat.messages import (
    CACHE_MARK,
    FunctionDefinition,
    FunctionName,
    HeldRefusal,
    functions_alone,
)
from server.api.chat.prepare import Effort
from server.api.openai.bodies import Labels
from server.api.openai.other_fields import HARMLESS, OTHER_NAMES, REASONING, RESPONSES
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
