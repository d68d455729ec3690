"""What `/v1/responses` answers, as OpenAPI describes it: dictionaries that orjson writes."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

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
