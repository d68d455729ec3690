"""From the wire to the engine and back: the only place that knows both."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from server.api.errors import invalid
from server.api.schemas import (
    MESSAGE_TYPES,
    Append,
    AppendBody,
    Continuation,
    Fork,
    Generate,
    Message,
    Resume,
    Sampling,
)
from server.engine.errors import InvalidRequest
from server.engine.types import Request, SamplingParams, Usage

# A shorter text is encoded in the event loop: it takes less time than a thread costs.
MAX_INLINE_CHARS = 2048

MAX_UNCHECKED_BYTES = 16 * 1024
MAX_NAME_CHARS = 64
MAX_IDS = 1 << 17

Body = TypeVar("Body", bound=BaseModel)

_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)
_MESSAGE_FIELDS = frozenset(
    name for message in (Generate, Append, Fork, Resume) for name in message.model_fields
)


class TokenizerLike(Protocol):
    """What is needed of `model.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, /) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for."""

    max_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Choices:
    """How many continuations are drawn, and whether they will be compared."""

    num: int = 1
    ranked: bool = False


ONE_CHOICE = Choices()


class Translator:
    """Builds engine requests from parsed messages. Raises `InvalidRequest`.

    A prompt that is text gets the model's start token where its session is
    empty; a prompt of token ids is taken as it is.
    """

    def __init__(self, tokenizer: TokenizerLike, limits: Limits) -> None:
        self.max_ids = limits.max_prompt_tokens
        self._tokenizer = tokenizer
        self._limits = limits

    async def generate(
        self,
        request_id: str,
        owner: str,
        wanted: Continuation,
        sampling: Sampling,
        choices: Choices = ONE_CHOICE,
    ) -> Request:
        """The request of a completion. Draws a seed where the client gave none."""
        tokens = await self._tokens(wanted.prompt, "prompt")
        if wanted.idempotency_key is not None and wanted.session is None and not wanted.keep:
            raise invalid("idempotency_key", "needs a session that is kept")
        if not tokens and wanted.session is None:
            raise invalid("prompt", "must not be empty unless it continues a session")
        return Request(
            request_id=request_id,
            owner=owner,
            tokens=tokens,
            sampling=self._sampling(sampling, choices.ranked),
            session=wanted.session,
            keep=bool(wanted.keep),
            start=not isinstance(wanted.prompt, list),
            key=wanted.idempotency_key,
            num_choices=choices.num,
        )

    async def append(self, request_id: str, owner: str, session: str, body: AppendBody) -> Request:
        """The request that only feeds a session."""
        if body.text is not None and body.tokens is not None:
            raise invalid("tokens", "give either text or tokens, not both")
        field = "text" if body.tokens is None else "tokens"
        tokens = await self._tokens(body.text if body.tokens is None else body.tokens, field)
        if not tokens:
            raise invalid(field, "must not be empty")
        return Request(
            request_id,
            owner,
            tokens,
            sampling=None,
            session=session,
            keep=True,
            start=body.tokens is None,
            key=body.idempotency_key,
            score=bool(body.logprobs),
        )

    async def _tokens(self, prompt: str | Sequence[int] | None, field: str) -> tuple[int, ...]:
        if prompt is None:
            return ()
        ids = await self._encode(prompt) if isinstance(prompt, str) else prompt
        if len(ids) > self._limits.max_prompt_tokens:
            raise invalid(field, f"must have at most {self._limits.max_prompt_tokens} tokens")
        if ids and max(ids) >= self._tokenizer.vocab_size:
            raise invalid(field, f"token ids must be below {self._tokenizer.vocab_size}")
        return tuple(ids)

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= MAX_INLINE_CHARS:
            return self._tokenizer.encode(text)
        return await asyncio.to_thread(self._tokenizer.encode, text)

    def _sampling(self, wire: Sampling, logprob: bool) -> SamplingParams:
        if wire.max_tokens is not None and wire.max_tokens > self._limits.max_tokens:
            raise invalid("max_tokens", f"must be at most {self._limits.max_tokens}")
        if any(id >= self._tokenizer.vocab_size for id in wire.stop_token_ids or ()):
            raise invalid("stop_token_ids", f"must be below {self._tokenizer.vocab_size}")
        given = wire.model_dump(include=set(Sampling.model_fields), exclude_none=True)
        stop = given.pop("stop", ())
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        given["stop_token_ids"] = tuple(given.pop("stop_token_ids", ()))
        given.setdefault("seed", secrets.randbits(32))
        return SamplingParams(**given, logprob=logprob)


def parse_body(model: type[Body], body: bytes, max_ids: int = MAX_IDS) -> Body:
    """A body as ``model``; raises `InvalidRequest` that names the first bad field.

    A list of more than ``max_ids`` is refused before anything looks at its items.
    """
    if len(body) > MAX_UNCHECKED_BYTES:
        _look_over(body, frozenset(model.model_fields), max_ids)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _first_problem(error) from None


def parse_message(text: str, max_ids: int = MAX_IDS) -> Message:
    """A client's frame; like `parse_body`."""
    if len(text) > MAX_UNCHECKED_BYTES:
        _look_over(text, _MESSAGE_FIELDS, max_ids)
    try:
        return _MESSAGE.validate_json(text)
    except ValidationError as error:
        raise _first_problem(error, tagged=True) from None


def _look_over(text: bytes | str, known: frozenset[str], max_ids: int) -> None:
    """One look before pydantic's: it would report a hundred thousand of them one by one."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return  # pydantic says what is wrong
    for name in value if isinstance(value, dict) else ():
        if name not in known:
            raise invalid(name[:MAX_NAME_CHARS], "extra inputs are not permitted")
        if isinstance(value[name], list) and len(value[name]) > max_ids:
            raise invalid(name, f"must have at most {max_ids} tokens")


def request_id_of(text: str) -> str | None:
    """The ``request_id`` of a frame that is not a message, to answer it by.

    Read by Python's lenient parser: a NaN or a lone surrogate elsewhere in the
    frame is no reason to leave its sender without an answer.
    """
    try:
        frame = json.loads(text)
        found = frame.get("request_id") if isinstance(frame, dict) else None
        if isinstance(found, str) and len(found) <= 64 and found.encode():
            return found
    except (ValueError, RecursionError):  # no JSON, or an id that is no Unicode text
        pass
    return None


def usage_object(usage: Usage) -> dict[str, int]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _first_problem(error: ValidationError, *, tagged: bool = False) -> InvalidRequest:
    """The deepest of the first field's problems: in a union, that of the nearest type.

    The value is not repeated: it may be long, and it is the client's secret.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = _path(problems[0], tagged)[:1]
    nearest: Any = max(
        (problem for problem in problems if _path(problem, tagged)[:1] == first),
        key=lambda problem: len(problem["loc"]),
    )
    message = nearest["msg"][0].lower() + nearest["msg"][1:]
    message = message.replace("input should be ", "must be ").replace("input should ", "must ")
    if nearest["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return invalid("type", f"must be one of {', '.join(MESSAGE_TYPES)}")
    if not first:
        return InvalidRequest(f"the message is not a JSON object: {message}")
    return invalid(str(first[0])[:MAX_NAME_CHARS], message)


def _path(problem: Any, tagged: bool) -> tuple[int | str, ...]:
    """Where a problem is, without the name of the message's type in front."""
    loc: tuple[int | str, ...] = problem["loc"]
    return loc[1:] if tagged else loc
