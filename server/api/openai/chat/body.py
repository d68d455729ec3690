"""The body of `POST /v1/chat/completions`, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from server.api.chat.answer_options import Effort
from server.api.chat.calls import ToolChoice
from server.api.chat.messages import MAX_PARTS, Messages, TemplateKwargs, TextPart, Tools
from server.api.openai.bodies import GenerationBody
from server.api.openai.other_fields import with_usual_thinking
from server.api.openai.refused import CHAT
from server.api.schemas.requests import SomeTokens
from server.api.schemas.responses import PromptUsage
from server.api.schemas.wire import Refusal, Wire


class Prediction(Wire):
    """What most of the answer is expected to be: what of it is right is generated faster."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]

    @property
    def text(self) -> str:
        """All of it."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    refused: ClassVar[Mapping[str, Refusal]] = CHAT

    messages: Messages
    max_completion_tokens: SomeTokens | None = None
    logprobs: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Effort | None = None
    prediction: Prediction | None = None

    @model_validator(mode="before")
    @classmethod
    def _usual_thinking(cls, value: object) -> object:
        return with_usual_thinking(value)


class ChatTop(TypedDict):
    """A token that was likely; ``bytes`` are what it stands for."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(ChatTop):
    """A token that was drawn."""

    top_logprobs: list[ChatTop]


class ChatLogprobs(TypedDict):
    """How likely the tokens of an answer were."""

    content: list[ChatToken]
    refusal: None


class CalledFunctionAnswer(TypedDict):
    """What to call; ``arguments`` is JSON that conforms to the function's schema."""

    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    """A call that the client may make for the model."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class ChatMessageAnswer(TypedDict):
    """What the assistant says, or calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    refusal: None
    tool_calls: NotRequired[list[ToolCallAnswer]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled"]
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """OpenAI's ``chat.completion``, with the seed, and of a kept session its name and length."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: PromptUsage
    seed: int
    session: NotRequired[str]
    position: NotRequired[int]
    prompt_token_ids: NotRequired[list[int]]
