"""What goes out over HTTP, as OpenAPI describes it. The handlers write the bytes themselves."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema


class ErrorDetail(BaseModel):
    """What went wrong: ``code`` is stable, ``param`` the field at fault."""

    message: str
    type: str
    param: str | None
    code: str
    retry_after_s: float | SkipJsonSchema[None] = None


class ErrorAnswer(BaseModel):
    """Every error."""

    error: ErrorDetail


class UsageAnswer(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    """The text, of which there is one."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length", "cancelled"]


class Completion(BaseModel):
    """OpenAI's ``text_completion``, with the session, the seed and the position."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: UsageAnswer
    session: str | None
    seed: int
    position: int


class SessionCreated(BaseModel):
    """A new session."""

    session: str
    epoch: str
    position: int
    state_bytes: int


class SessionAnswer(BaseModel):
    """A session as its owner sees it. ``parked``: what it runs rests until somebody reads it."""

    session: str
    epoch: str
    position: int
    seq: int
    busy: bool
    parked: bool
    idle_s: float
    state_bytes: int


class ListedSession(BaseModel):
    """A session in a list."""

    session: str
    epoch: str
    position: int
    seq: int
    busy: bool
    stored_bytes: int


class SessionList(BaseModel):
    """Some of the caller's sessions; ``after`` the last of them come more."""

    object: Literal["list"]
    data: list[ListedSession]
    has_more: bool


class Forked(BaseModel):
    """Copies of a session, each a session of its own."""

    session: str
    sessions: list[str]
    epoch: str
    position: int


class SessionDeleted(BaseModel):
    """A session that is no more."""

    session: str
    deleted: Literal[True]


class Appended(BaseModel):
    """What a session has become."""

    session: str
    position: int
    usage: UsageAnswer
    logprobs: list[float] | None = None


class ModelDetails(BaseModel):
    """What our own clients show of a model."""

    state_bytes_per_session: int
    kv_cache_bytes_per_token: int
    max_sessions: int
    parameters: int
    vocab_size: int
    digest: str
    attention: str
    dtype: str


class ModelAnswer(BaseModel):
    """OpenAI's ``model``, with details of our own."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    everstream: ModelDetails


class ModelList(BaseModel):
    """OpenAI's list of models; there is one."""

    object: Literal["list"]
    data: list[ModelAnswer]


class Health(BaseModel):
    """One word."""

    status: str
