"""What may come to the routes for text and tokens: completions, embeddings, scores, tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from server.api.chat.messages import Messages, TemplateKwargs, Tools
from server.api.openai.other_fields import (
    COMPLETIONS,
    EMBEDDINGS,
    HARMLESS,
    OTHER_NAMES,
    with_named_schema,
)
from server.api.schemas.requests import (
    MAX_CHOICES,
    Continuation,
    MaxTokens,
    Prefixed,
    Sampling,
    StreamOptions,
    TokenIds,
    TopLogprobs,
)
from server.api.schemas.wire import Label, ModelName, Refusal, Wire
from server.errors import invalid

#: Prompts of one request, and continuations of one context.
MAX_PROMPTS = 256
#: Inputs of one request for embeddings, as many as OpenAI takes.
MAX_INPUTS = 2048


class Labels(Wire):
    """What a client may note down for itself; nothing here depends on it."""

    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, value: object, info: ValidationInfo) -> object:
        """They are among the fields without effect that the head of the answer lists."""
        if isinstance(value, dict) and isinstance(info.context, set):
            given = (name for name in Labels.model_fields if value.get(name) is not None)
            info.context.update(given)
        return value


Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
IdLists = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]


def kind_of_prompt(value: object) -> str:
    """Which of OpenAI's four kinds a prompt is of, by its first item."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    if isinstance(first, str):
        return "texts"
    return "batch" if isinstance(first, list) else "ids"


#: A text, several, token ids, or several lists of them.
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[IdLists, Tag("batch")],
    Discriminator(kind_of_prompt),
]


#: The same, for embeddings.
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("texts")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("batch")],
    Discriminator(kind_of_prompt),
]


def prompts_in(prompt: Sequence[object] | str) -> list[str | list[int]]:
    """Each of them by itself."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [cast("str | list[int]", prompt)]
    return list(cast("Sequence[str | list[int]]", prompt))


#: One text, or its token ids.
OnePrompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("ids")],
    Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
]


class GenerationBody(Sampling, Continuation, Labels):
    """What the bodies of completions and of chats share."""

    hints = HARMLESS
    other_names = OTHER_NAMES

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _usual_format(cls, value: object) -> object:
        return with_named_schema(value)

    def check(self, shows_logprobs: bool) -> None:
        """Raises `InvalidRequest` for fields that do not go together."""
        if self.stream_options is not None and self.stream_options.asks and not self.stream:
            raise invalid("stream_options", "needs stream to be true")
        if self.idempotency_key is not None and shows_logprobs:
            raise invalid("idempotency_key", "cannot be combined with logprobs, which are not kept")
        if self.idempotency_key is not None and self.return_token_ids:
            raise invalid("idempotency_key", "cannot be combined with return_token_ids")


class CompletionBody(GenerationBody, Prefixed):
    """`POST /v1/completions`."""

    refused: ClassVar[Mapping[str, Refusal]] = COMPLETIONS

    prompt: Prompt | None = None
    max_tokens: MaxTokens | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)


class EmbeddingsBody(Wire):
    """`POST /v1/embeddings`."""

    refused: ClassVar[Mapping[str, Refusal]] = EMBEDDINGS

    model: ModelName | None = None
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    user: Label | None = None


class ScoreBody(Wire):
    """`POST /v1/score`: how likely each of ``continuations`` is after ``prompt``."""

    model: ModelName | None = None
    prompt: OnePrompt
    continuations: Annotated[
        list[OnePrompt], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
    ]
    top: TopLogprobs | None = None
    user: Label | None = None


class TokenizeBody(Wire):
    """`POST /tokenize`: a text, or messages as `POST /v1/chat/completions` renders them."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    allow_special: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Wire):
    """`POST /detokenize`."""

    model: ModelName | None = None
    tokens: TokenIds
