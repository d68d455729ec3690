"""Routes that read texts and generate none: scores, vectors, and token ids."""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answers import (
    JsonAnswer,
    LastEventsWriter,
    ended,
    json_response,
    total_usage,
    usage_object,
)
from server.api.chat.prepare import reasoning_of
from server.api.chat.prompt import prompt_of
from server.api.openai.bodies import (
    DetokenizeBody,
    EmbeddingsBody,
    ScoreBody,
    TokenizeBody,
    prompts_in,
)
from server.api.openai.choices import BLOCK_TOKENS, JsonList, TokenNames, Top, finite, written_list
from server.api.prepare import (
    check_ids,
    embedding_requests,
    in_thread_if_long,
    prompt_tokens,
    unit_vector,
    vectors_bytes,
)
from server.api.routing import ERRORS, KEY_ERRORS, body_schema, service_for
from server.api.schemas.responses import UsageAnswer
from server.api.schemas.wire import body_of
from server.engine.text import TokenArray, text_with_names
from server.engine.types import Event, Finished
from server.engine.types import Request as EngineRequest
from server.errors import InternalFailure, invalid
from server.models.service import LOGPROB_BYTES, TOKEN_BYTES, Service

# -------------------------------------------------------------------------------------------------
# `POST /v1/score`: how likely continuations are after a context that is computed once.
#
# A text is tokenized by itself: the boundary is where the texts meet, and a space
# belongs to the text that has it. Token ids are taken as they are.

router = APIRouter()


class ScoreAnswer(TypedDict):
    """How likely a continuation is; ``top_logprobs`` has pairs of an id and its value."""

    object: Literal["score"]
    index: int
    logprob: float
    num_tokens: int
    is_greedy: bool
    tokens: list[int]
    token_logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] | None


class Scores(TypedDict):
    """How likely each continuation is."""

    id: str
    object: Literal["list"]
    model: str
    data: list[ScoreAnswer]
    usage: UsageAnswer


@router.post(
    "/v1/score",
    response_model=Scores,
    responses=ERRORS,
    openapi_extra=body_schema(ScoreBody),
)
async def score(request: Request) -> Response:
    """The log-likelihood of each continuation of one context."""
    body = await body_of(ScoreBody, request)
    service = service_for(request, body.model)
    engine_request = await _engine_request(service, body, request.state.owner)
    model, num_top = service.model.name, body.top
    num_tokens = sum(map(len, engine_request.continuations))
    num_bytes = num_tokens * (1 + (num_top or 0)) * LOGPROB_BYTES
    service.large_answers.check(num_bytes, "top", "the continuations and top")
    writer = LastEventsWriter(lambda lasts: _scores(lasts, engine_request, model, num_top))
    return JsonAnswer(service, engine_request, writer, num_bytes)


async def _engine_request(service: Service, body: ScoreBody, owner: str) -> EngineRequest:
    """One request: an empty context is the start token."""
    context = await prompt_tokens(service, owner, body.prompt, "prompt")
    if not context and not isinstance(body.prompt, str):
        raise invalid("prompt", 'must have a token; the text "" is the start token')
    continuations = []
    for one in body.continuations:
        tokens = await prompt_tokens(service, owner, one, "continuations", bool(context))
        continuations.append(tokens)
        await asyncio.sleep(0)  # others have their turn between them
    if not all(continuations):
        raise invalid("continuations", "must not be empty")
    service.limits.check_prompt(sum(map(len, continuations)), "continuations", " together")
    return EngineRequest(
        f"score-{secrets.token_hex(16)}",
        owner,
        context or TokenArray((service.model.bos_token_id,)),
        sampling=None,
        start=isinstance(body.prompt, str) and bool(context),
        num_top=max(1, body.top or 0),
        continuations=tuple(continuations),
    )


def _scores(
    lasts: Mapping[str, Event], engine_request: EngineRequest, model: str, num_top: int | None
) -> Iterator[bytes]:
    """The answer, continuation by continuation."""
    ends = [ended(lasts[id]) for id in engine_request.ids]
    answer: Scores = {
        "id": engine_request.request_id,
        "object": "list",
        "model": model,
        "data": [],
        "usage": usage_object(total_usage(ends)),
    }
    return written_list(answer, "data", _written(engine_request, ends, num_top))


def _written(
    engine_request: EngineRequest, ends: Sequence[Finished], num_top: int | None
) -> Iterator[bytes]:
    for index, (tokens, end) in enumerate(zip(engine_request.continuations, ends, strict=True)):
        yield orjson.dumps((yield from _scored(index, tokens, end, num_top)))


def _scored(
    index: int, tokens: Sequence[int], end: Finished, num_top: int | None
) -> Generator[bytes, None, dict[str, Any]]:
    """One continuation's. It is greedy where each of its tokens is the most probable one."""
    if end.logprobs is None or end.tops is None:
        raise InternalFailure("the request was cancelled")
    pairs = zip(end.logprobs, end.tops, strict=True)
    tops = None if num_top is None else (yield from _tops(end.tops, num_top))
    return {
        "object": "score",
        "index": index,
        "logprob": finite(math.fsum(end.logprobs)),
        "num_tokens": len(tokens),
        "is_greedy": all(logprob == top[0][1] for logprob, top in pairs),
        "tokens": [*tokens],
        "token_logprobs": [finite(value) for value in end.logprobs],
        "top_logprobs": tops,
    }


def _tops(tops: Sequence[Top], num_top: int) -> Generator[bytes, None, orjson.Fragment]:
    """The most probable tokens in each place; others have their turn between blocks."""
    written = JsonList()
    for index, top in enumerate(tops):
        written.add([[[id, finite(value)] for id, value in top[:num_top]]])
        if index % BLOCK_TOKENS == 0:
            yield b""
    return written.json()


# -------------------------------------------------------------------------------------------------
# `POST /v1/embeddings`: the mean of the last hidden states, with the length 1.
#
# The hidden states are those after the final norm, of all tokens that are fed, the
# start token of a text included.


class EmbeddingAnswer(TypedDict):
    """A unit vector, or its numbers of 32 bits in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens that were fed."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """A vector for each input."""

    object: Literal["list"]
    data: list[EmbeddingAnswer]
    model: str
    usage: EmbeddingUsage


@router.post(
    "/v1/embeddings",
    response_model=Embeddings,
    responses=ERRORS,
    openapi_extra=body_schema(EmbeddingsBody),
)
async def embed(request: Request) -> Response:
    """A vector for each input."""
    body = await body_of(EmbeddingsBody, request)
    service = service_for(request, body.model)
    id, inputs = f"embd-{secrets.token_hex(16)}", prompts_in(body.input)
    requests = await embedding_requests(service, id, request.state.owner, inputs, "input")
    model, as_text = service.model.name, body.encoding_format == "base64"
    writer = LastEventsWriter(lambda lasts: _vectors(lasts, requests, model, as_text))
    return JsonAnswer(service, requests, writer, vectors_bytes(service, requests))


def _vectors(
    lasts: Mapping[str, Event], requests: Sequence[EngineRequest], model: str, as_text: bool
) -> Iterator[bytes]:
    """The answer, vector by vector."""
    ends = [ended(lasts[each.request_id]) for each in requests]
    num_tokens = sum(end.usage.prompt_tokens for end in ends)
    usage: EmbeddingUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer: Embeddings = {"object": "list", "data": [], "model": model, "usage": usage}
    vectors = (
        {"object": "embedding", "index": index, "embedding": _vector(end, as_text)}
        for index, end in enumerate(ends)
    )
    return written_list(answer, "data", map(orjson.dumps, vectors))


def _vector(end: Finished, as_text: bool) -> list[float] | str:
    """The unit vector; as text, little-endian numbers of 32 bits in base64."""
    unit = unit_vector(end)
    if not as_text:
        return unit
    return base64.b64encode(struct.pack(f"<{len(unit)}f", *unit)).decode()


# -------------------------------------------------------------------------------------------------
# Text to token ids and back, and what the tokenizer is: as vLLM's users know it.


#: Tokens whose names are looked up at once.
BLOCK_IDS = 4096

_OF_TEXT = ("add_special_tokens", "allow_special")
_OF_MESSAGES = (
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
)


class Tokenized(TypedDict):
    """Token ids; ``max_model_len`` is what one request may have."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(TypedDict):
    """A token and its text; bytes that are no text are numbers."""

    id: int
    piece: str | list[int]


class TokensAlone(TypedDict):
    """What ``content`` is, as llama.cpp's clients ask for it."""

    tokens: list[int] | list[TokenPiece]


class Detokenized(TypedDict):
    """The text of token ids, by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(TypedDict):
    """What `tokenizer_config.json` says elsewhere."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    bos_token_id: int
    eos_token: str | None
    eos_token_id: int
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str]
    add_bos_token: bool
    chat_template: str | None


@router.post(
    "/tokenize",
    response_model=Tokenized | TokensAlone,
    responses=ERRORS,
    openapi_extra=body_schema(TokenizeBody),
)
async def tokenize(request: Request) -> Response:
    """The token ids of a text or of messages, as a completion is fed them."""
    body = await body_of(TokenizeBody, request)
    service = service_for(request, body.model)
    if body.content is not None:
        return await _pieces(service, body)
    _check(body)
    ids = await _ids(service, body)
    written = _tokenized(service, ids, bool(body.return_token_strs))
    parts = service.large_answers.parts(written, len(ids) * TOKEN_BYTES)
    return Response(b"".join([part async for part in parts]), media_type="application/json")


async def _pieces(service: Service, body: TokenizeBody) -> Response:
    """llama.cpp's answer for ``content``: ids, or objects of an id and its text."""
    for name in (*_OF_TEXT, *_OF_MESSAGES, "prompt", "messages", "return_token_strs"):
        if getattr(body, name) is not None:
            raise invalid(name, "is for prompt and messages")
    text, allow = body.content or "", body.parse_special is not False
    encode = partial(service.tokenizer.encode, allow_special=allow)
    ids = await in_thread_if_long(len(text), partial(encode, text))
    if body.add_special:
        ids = [service.model.bos_token_id, *ids]
    if not body.with_pieces:
        return json_response({"tokens": ids})
    names = service.tokenizer.special_names
    written = (names.get(id) or service.tokenizer.token_bytes(id) for id in ids)
    pieces = [piece if isinstance(piece, str) else _piece(piece) for piece in written]
    tokens = [{"id": id, "piece": piece} for id, piece in zip(ids, pieces, strict=True)]
    return json_response({"tokens": tokens})


def _piece(data: bytes) -> str | list[int]:
    """Bytes that are no text are numbers."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _tokenized(service: Service, ids: list[int], with_names: bool) -> Iterator[bytes]:
    """The answer; others have their turn while many names are looked up."""
    names, shown = TokenNames(service.tokenizer), JsonList()
    for start in range(0, len(ids) if with_names else 0, BLOCK_IDS):
        shown.add([names[id] for id in ids[start : start + BLOCK_IDS]])
        yield b""
    yield orjson.dumps(
        {
            "count": len(ids),
            "max_model_len": service.limits.max_model_len,
            "tokens": ids,
            "token_strs": shown.json() if with_names else None,
        }
    )


def _check(body: TokenizeBody) -> None:
    """Raises `InvalidRequest` where not exactly one of text and messages is given."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    of_other = _OF_TEXT if body.prompt is None else _OF_MESSAGES
    for name in of_other:
        if getattr(body, name) is not None:
            raise invalid(name, f"is for {'prompt' if body.prompt is None else 'messages'}")


async def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        reasoning = reasoning_of(service, None, "chat_template_kwargs", body.chat_template_kwargs)
        prompt = await prompt_of(
            service,
            body.messages,
            body.tools,
            body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs={**(body.chat_template_kwargs or {}), **reasoning.variables},
        )
        return [*prompt.ids]
    text = body.prompt or ""
    encode = partial(service.tokenizer.encode, allow_special=body.allow_special is not False)
    ids = await in_thread_if_long(len(text), partial(encode, text))
    return ids if body.add_special_tokens is False else [service.model.bos_token_id, *ids]


@router.post(
    "/detokenize",
    response_model=Detokenized,
    responses=ERRORS,
    openapi_extra=body_schema(DetokenizeBody),
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens by their names."""
    body = await body_of(DetokenizeBody, request)
    service = service_for(request, body.model)
    check_ids(service, body.tokens, "tokens")
    text = await service.large_answers.run(lambda: text_with_names(service.tokenizer, body.tokens))
    answer: Detokenized = {"prompt": text, "content": text}
    return json_response(answer)


@router.get("/tokenizer_info", response_model=TokenizerInfo, responses=KEY_ERRORS)
async def tokenizer_info(request: Request) -> Response:
    """What `tokenizer_config.json` says elsewhere."""
    service = service_for(request)
    model, names = service.model, service.tokenizer.special_names
    answer: TokenizerInfo = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": service.tokenizer.vocab_size,
        "bos_token": names.get(model.bos_token_id),
        "bos_token_id": model.bos_token_id,
        "eos_token": names.get(service.tokenizer.eos_token_id),
        "eos_token_id": service.tokenizer.eos_token_id,
        "pad_token": None,
        "unk_token": None,
        "additional_special_tokens": sorted(names.values()),
        "add_bos_token": True,
        "chat_template": service.chat_template.source,
    }
    return json_response(answer)
