"""What goes out, as OpenAPI and AsyncAPI describe it: dictionaries that orjson writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
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
    top_n_sigma: float
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


class ModelMeta(TypedDict):
    """What llama.cpp's server says of a model; ``size`` is that of the weights, estimated."""

    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class ModelAnswer(TypedDict):
    """OpenAI's ``model``, with details of our own."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: ModelMeta
    everstream: ModelDetails


class ModelList(TypedDict):
    """OpenAI's list of models, the default one first."""

    object: Literal["list"]
    data: list[ModelAnswer]


class Health(TypedDict):
    """One word."""

    status: str


# -------------------------------------------------------------------------------------------------
# What the server sends on `/v1/stream`, described once.
#
# `server.api.events` makes frames of these types, mypy checks them field by field,
# the AsyncAPI document shows them, and the tests validate every frame that they receive by
# them. A token's frame alone is put together from bytes, and a test compares the two.
# In the document their names do without "Frame".


STRICT = ConfigDict(strict=True, extra="forbid")


@with_config(STRICT)
class Frame(TypedDict):
    """Base of all frames from the server. ``request_id`` is that of the client's message."""

    request_id: str


class SessionFrame(Frame):
    """Base of frames that name a session's last event and its position."""

    session: str
    epoch: str
    seq: int
    position: int


class CreatedFrame(Frame, SessionCreated):
    """A new session."""

    type: Literal["created"]


class StartedFrame(SessionFrame):
    """A ``generate`` has its session, whose last event before had ``seq``."""

    type: Literal["started"]
    seed: int


@with_config(STRICT)
class TopLogprob(TypedDict):
    """One of the most probable tokens at a position."""

    token_id: int
    logprob: float


class TokenFrame(Frame):
    """One generated token. With ``top_logprobs`` in its request it has its log-probability."""

    type: Literal["token"]
    seq: int
    position: int
    token_id: int
    text: str
    logprob: NotRequired[float]
    top_logprobs: NotRequired[list[TopLogprob]]


class FinishedFrame(Frame):
    """The end of a generation; ``session`` is null where it ended with the request.

    ``prefix`` is there where the request had ``return_prefix`` and the prompt's state is kept.
    """

    type: Literal["finished"]
    session: str | None
    seq: int
    position: int
    text: str
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    usage: UsageAnswer
    prefix: NotRequired[str]
    error: NotRequired[str]


class AppendedFrame(Frame):
    """What a session has become by an ``append``."""

    type: Literal["appended"]
    session: str | None
    position: int
    usage: UsageAnswer
    logprobs: NotRequired[Sequence[float]]


class DeletedFrame(Frame):
    """A session was deleted."""

    type: Literal["deleted"]
    session: str


class ForkedFrame(Frame, Forked):
    """Copies of a session, each a session of its own."""

    type: Literal["forked"]


class RewoundFrame(SessionFrame):
    """A session was cut back, and its epoch is a new one."""

    type: Literal["rewound"]


class ResumedFrame(SessionFrame):
    """The events after ``seq`` follow, up to ``last_seq``; where ``busy``, those to come too."""

    type: Literal["resumed"]
    last_seq: int
    busy: bool


class ResetFrame(SessionFrame):
    """The events after the cursor are not available; ``reason`` is for people."""

    type: Literal["reset"]
    last_seq: int
    busy: bool
    reason: str


class DetachedFrame(Frame):
    """No more frames of this request come."""

    type: Literal["detached"]


class MigrateFrame(SessionFrame):
    """The session was saved here: a ``resume`` continues after a restart, or elsewhere."""

    type: Literal["migrate"]


@with_config(STRICT)
class ErrorFrame(TypedDict):
    """What cannot be done; ``request_id`` is null where the client gave none."""

    type: Literal["error"]
    request_id: str | None
    status: int
    error: ErrorDetail


AnyFrame = Annotated[
    CreatedFrame
    | StartedFrame
    | TokenFrame
    | FinishedFrame
    | AppendedFrame
    | DeletedFrame
    | ForkedFrame
    | RewoundFrame
    | ResumedFrame
    | ResetFrame
    | DetachedFrame
    | MigrateFrame
    | ErrorFrame,
    Field(discriminator="type"),
]
