"""What goes out over HTTP, as OpenAPI describes it. The handlers write the bytes themselves."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong: ``code`` is stable, ``param`` the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


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
    position: int
    state_bytes: int


class SessionAnswer(BaseModel):
    """A session as its owner sees it."""

    session: str
    position: int
    seq: int
    busy: bool
    idle_s: float
    state_bytes: int


class SessionDeleted(BaseModel):
    """A session that is no more."""

    session: str
    deleted: Literal[True]


class Appended(BaseModel):
    """What a session has become."""

    session: str
    position: int
    usage: UsageAnswer


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
