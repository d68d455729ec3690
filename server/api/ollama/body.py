"""The bodies of Ollama's routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from server.api.chat.messages import MAX_CALLS, MAX_MESSAGES, NO_MEDIA, FunctionName, Name, Tools
from server.api.schemas.other_samplers import OTHER_SAMPLERS, PARTS_OF_OTHERS
from server.api.schemas.requests import UNLIMITED, Drawing, MaxTokens, Schema
from server.api.schemas.wire import History, ItemId, ModelName, Refusal, Wire

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
