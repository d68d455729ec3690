"""The bodies of Ollama's routes, and the one form of a chat that they become."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from server.api.chat.messages import (
    MAX_CALLS,
    MAX_MESSAGES,
    NO_MEDIA,
    AssistantMessage,
    CalledFunction,
    ChatMessage,
    FunctionName,
    Name,
    SystemMessage,
    ToolCall,
    ToolMessage,
    Tools,
    UserMessage,
)
from server.api.chat.prepare import USUAL, Chat, Effort
from server.api.schemas.requests import (
    OTHER_SAMPLERS,
    PARTS_OF_OTHERS,
    UNLIMITED,
    Continuation,
    Drawing,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    MaxTokens,
    ResponseFormat,
    Sampling,
    Schema,
)
from server.api.schemas.wire import History, ItemId, ModelName, Refusal, Wire
from server.errors import invalid
from server.models.service import Service

#: Inputs of one request for embeddings.
MAX_INPUTS = 2048

_IMAGES = {"images": Refusal(NO_MEDIA, ([],))}


NumPredict = Annotated[
    MaxTokens, BeforeValidator(lambda number: UNLIMITED if number in (0, -2) else number)
]


class OllamaOptions(Drawing):
    """``options``: Ollama's, and our own by their usual names.

    Those of how Ollama loads a model have no effect. -1 and 0 tokens, and -2, are no limit.
    """

    hints = frozenset(
        {
            *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa"),
            *("low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
            *("embedding_only", "draft_num_predict"),
            *PARTS_OF_OTHERS,
        }
    )
    refused: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        "penalize_newline": Refusal("penalties look at all tokens", (True,)),
    }

    num_predict: NumPredict | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=10)
    top_logprobs: None = None


def _format(value: object) -> object:
    if isinstance(value, str) and value not in ("", "json"):
        raise PydanticCustomError("format", 'must be "json" or a JSON schema')
    return value


#: An empty text asks for nothing.
Format = Annotated[Literal["", "json"] | Schema, BeforeValidator(_format)]
Think = bool | Literal["low", "medium", "high"]


class OllamaRequest(Wire):
    """What all bodies share."""

    hints = frozenset({"keep_alive"})

    model: ModelName


class GeneratingBody(OllamaRequest):
    """What chats and single prompts share. A stream unless ``stream`` is false."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "logprobs": Refusal("POST /v1/chat/completions has them", (False,)),
        "top_logprobs": Refusal("POST /v1/chat/completions has them", (0,)),
        "truncate": Refusal("a prompt is never cut: the state has no length limit", (False, True)),
        "shift": Refusal("a prompt is never cut: the state has no length limit", (False, True)),
    }

    options: OllamaOptions | None = None
    stream: bool | None = None
    format: Format | None = None
    think: Think | None = None


class OllamaFunction(History):
    """A function that was called, with its arguments as an object."""

    name: FunctionName
    arguments: dict[str, Any] | None = None


class OllamaCall(History):
    """A call that the model has made; Ollama's have no id in most versions."""

    id: ItemId | None = None
    function: OllamaFunction


class OllamaMessage(Wire):
    """A message of any role. ``tool_name`` says which call a tool's message is the result of."""

    refused: ClassVar[Mapping[str, Refusal]] = _IMAGES

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = (
        None
    )
    tool_name: Name | None = None
    tool_call_id: ItemId | None = None


class OllamaChatBody(GeneratingBody):
    """`POST /api/chat`. Without messages nothing is done: the model is loaded."""

    messages: (
        Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None
    ) = None
    tools: Tools | None = None


class GenerateBody(GeneratingBody):
    """`POST /api/generate`. Without a prompt nothing is done: the model is loaded."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **GeneratingBody.refused,
        **_IMAGES,
        "suffix": Refusal("the model cannot fill in: it reads from left to right", ("",)),
        "template": Refusal("the template comes from the model alone; use raw", ("",)),
        "context": Refusal("use POST /api/chat, whose prompts are cached", ([],)),
        "width": Refusal(NO_MEDIA, (0,)),
        "height": Refusal(NO_MEDIA, (0,)),
        "steps": Refusal(NO_MEDIA, (0,)),
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


_CUT = {"dimensions": Refusal("the vector has the model's hidden size, and is not cut", (0,))}


class EmbedBody(OllamaRequest):
    """`POST /api/embed`."""

    hints = OllamaRequest.hints | {"truncate", "options"}
    refused: ClassVar[Mapping[str, Refusal]] = _CUT

    input: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)]


class OldEmbeddingsBody(OllamaRequest):
    """`POST /api/embeddings`: the vector of one text."""

    hints = OllamaRequest.hints | {"options"}

    prompt: str


class ShowBody(Wire):
    """`POST /api/show`."""

    hints = frozenset({"verbose"})

    model: ModelName | None = None
    name: ModelName | None = None


class PullBody(History):
    """`POST /api/pull`, and the other routes that change which models there are."""

    model: ModelName | None = None
    name: ModelName | None = None
    stream: bool | None = None


#: What fields of the engine and of chats are called here.
NAMES = {
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in ("stop", "top_k", "logit_bias", "repeat_last_n")},
}


def new_id() -> str:
    """Of a request; Ollama's answers have none."""
    return f"ollama-{secrets.token_hex(16)}"


def chat_of(service: Service, body: OllamaChatBody, wanted: Continuation) -> Chat:
    """The chat of a body that has messages."""
    return _chat(service, body, wanted, list(_messages(body.messages or ())), body.tools)


def chat_of_prompt(service: Service, body: GenerateBody, wanted: Continuation) -> Chat:
    """The chat of one prompt, in the model's template."""
    messages: list[ChatMessage] = []
    if body.system:
        messages.append(SystemMessage(role="system", content=body.system))
    messages.append(UserMessage(role="user", content=body.prompt or ""))
    return _chat(service, body, wanted, messages, None)


def _chat(
    service: Service,
    body: GeneratingBody,
    wanted: Continuation,
    messages: Sequence[ChatMessage],
    tools: Any,
) -> Chat:
    effort, variables = _thinking(service, body)
    last = messages[-1]
    return Chat(
        id=new_id(),
        messages=messages,
        drawing=drawing_of(body.options),
        wanted=wanted,
        tools=tools,
        response_format=format_of(body.format),
        max_tokens=None if body.options is None else body.options.num_predict,
        effort=effort,
        effort_field="think",
        template_kwargs=variables,
        continue_final_message=isinstance(last, AssistantMessage) and not last.tool_calls,
        names=NAMES,
    )


def drawing_of(options: OllamaOptions | None) -> Drawing:
    """How tokens are drawn."""
    if options is None:
        return Drawing.model_construct()
    given: dict[str, Any] = {name: getattr(options, name) for name in Drawing.model_fields}
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    return Drawing.model_construct(**given)


def sampling_of_raw(body: GenerateBody) -> Sampling:
    """How tokens are drawn after a prompt that no template is applied to."""
    drawing = drawing_of(body.options)
    return Sampling.model_construct(
        **{name: getattr(drawing, name) for name in Drawing.model_fields},
        max_tokens=None if body.options is None else body.options.num_predict,
        response_format=format_of(body.format),
    )


def format_of(wanted: Format | None) -> ResponseFormat | None:
    """OpenAI's form of a format."""
    if not isinstance(wanted, dict):
        return JsonObjectFormat(type="json_object") if wanted == "json" else None
    schema = JsonSchema(name="format", schema=wanted, description=None)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def _thinking(service: Service, body: GeneratingBody) -> tuple[Effort | None, Mapping[str, Any]]:
    """How much to think, and the variable of the template that turns it on without a level."""
    think, thinking = body.think, service.chat_template.thinking
    if think is None:
        return None, {}
    if think is False:
        return "none", {}
    if thinking is None:
        raise invalid("think", "is not supported: the model does not think apart from its answer")
    if isinstance(think, str) and (thinking.efforts or think == USUAL):
        return think, {}
    return None, {switch.name: switch.on for switch in thinking.switches[:1]}


def _messages(given: Sequence[OllamaMessage]) -> Iterator[ChatMessage]:
    """Calls without an id are numbered; a tool's message answers the first open one of its name."""
    num_calls, unanswered = 0, list[ToolCall]()
    for message in given:
        content = message.content or ""
        if message.role == "system":
            yield SystemMessage(role="system", content=content)
        elif message.role == "user":
            yield UserMessage(role="user", content=content)
        elif message.role == "tool":
            yield ToolMessage(
                role="tool", content=content, tool_call_id=_answered(message, unanswered)
            )
        else:
            calls = [
                ToolCall(
                    id=call.id or f"call_{number}",
                    function=CalledFunction(
                        name=call.function.name,
                        arguments=orjson.dumps(call.function.arguments or {}).decode(),
                    ),
                )
                for number, call in enumerate(message.tool_calls or (), num_calls)
            ]
            num_calls, unanswered = num_calls + len(calls), calls[:]
            yield AssistantMessage(
                role="assistant",
                content=content,
                reasoning_content=message.thinking or None,
                tool_calls=calls or None,
            )


def _answered(message: OllamaMessage, unanswered: list[ToolCall]) -> str:
    """The id of the call that a tool's message is the result of."""
    if message.tool_call_id is not None:
        return message.tool_call_id
    named = (call for call in unanswered if call.function.name == message.tool_name)
    call = next(named, unanswered[0] if unanswered else None)
    if call is None:
        return "call_0"
    unanswered.remove(call)
    return call.id
