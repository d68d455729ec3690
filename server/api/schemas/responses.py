"""What goes out over HTTP, as OpenAPI describes it: dictionaries that orjson writes."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

#: Where clients must accept fields that they do not know, in a strict frame too.
OPEN = ConfigDict(strict=True)


@with_config(OPEN)
class ErrorDetail(TypedDict):
    """What went wrong: ``code`` is stable, ``param`` the field at fault."""

    message: str
    type: str
    param: str | None
    code: str
    retry_after_s: NotRequired[float]


class ErrorAnswer(TypedDict):
    """Every error."""

    error: ErrorDetail


@with_config(OPEN)
class CompletionDetails(TypedDict):
    """Of the generated tokens those of the thinking, with its markers, and those drafted rightly.

    ``rejected_prediction_tokens`` were drafted, and others generated in their place.
    """

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


@with_config(OPEN)
class UsageAnswer(TypedDict):
    """Tokens of one request; the details are there where there is something to say."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: NotRequired[CompletionDetails]


class PromptDetails(TypedDict):
    """Of the prompt's tokens, those that were not computed again."""

    cached_tokens: int


class PromptUsage(UsageAnswer):
    """Tokens of one request that generates."""

    prompt_tokens_details: PromptDetails


class SessionCreated(TypedDict):
    """A new session."""

    session: str
    epoch: str
    position: int
    state_bytes: int


class SessionAnswer(TypedDict):
    """A session as its owner sees it. ``parked``: what it runs waits for a reader."""

    session: str
    model: str
    epoch: str
    position: int
    seq: int
    busy: bool
    parked: bool
    idle_s: float
    state_bytes: int


class ListedSession(TypedDict):
    """A session in a list."""

    session: str
    model: str
    epoch: str
    position: int
    seq: int
    busy: bool
    stored_bytes: int


class SessionList(TypedDict):
    """Some of the caller's sessions; ``after`` the last of them come more."""

    object: Literal["list"]
    data: list[ListedSession]
    has_more: bool


class SessionTextPart(TypedDict):
    """Tokens ``start`` to ``end`` of a session: ``input`` was fed to it, ``output`` generated."""

    kind: Literal["input", "output"]
    start: int
    end: int
    text: str


class SessionText(TypedDict):
    """The text of a session; where ``end`` is less than ``position``, there is more."""

    session: str
    epoch: str
    start: int
    end: int
    position: int
    parts: list[SessionTextPart]


class Forked(TypedDict):
    """Copies of a session, each a session of its own."""

    session: str
    sessions: list[str]
    epoch: str
    position: int


class SessionDeleted(TypedDict):
    """A deleted session."""

    session: str
    deleted: Literal[True]


class Appended(TypedDict):
    """What a session has become."""

    session: str
    position: int
    usage: UsageAnswer
    logprobs: NotRequired[list[float]]


class SamplingDefaults(TypedDict):
    """What holds for a request that does not say."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


class StateTensor(TypedDict):
    """A tensor that each of ``layers`` layers has in a session's state; ``bytes`` of all."""

    name: str
    shape: list[int]
    dtype: str
    layers: int
    bytes: int


class ModelDetails(TypedDict):
    """What our own clients show of a model.

    ``chat``: it has a chat template, and ``thinking``: it may think before its answer.
    """

    state_bytes_per_session: int
    fixed_state_bytes: int
    state_bytes_per_token: int
    context: int
    past: Literal["stop", "slide"] | None
    kv_cache_bytes_per_token: int
    max_sessions: int
    state: list[StateTensor]
    parameters: int
    vocab_size: int
    digest: str
    attention: str
    dtype: str
    sampling: SamplingDefaults
    chat: bool
    thinking: bool


class ModelAnswer(TypedDict):
    """OpenAI's ``model``, with details of our own."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    everstream: ModelDetails


class ModelList(TypedDict):
    """OpenAI's list of models, the default one first."""

    object: Literal["list"]
    data: list[ModelAnswer]


class Health(TypedDict):
    """One word."""

    status: str
