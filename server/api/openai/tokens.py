"""Text to token ids and back, and what the tokenizer is: as vLLM's users know it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import orjson
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answers import json_response
from server.api.chat.prepare import reasoning_of
from server.api.chat.prompt import prompt_of
from server.api.openai.bodies import DetokenizeBody, TokenizeBody
from server.api.openai.choices import JsonList, TokenNames
from server.api.prepare import MAX_INLINE_CHARS, check_ids
from server.api.routing import ERRORS, KEY_ERRORS, body_schema, service_for
from server.api.schemas.parse import body_of
from server.engine.text import text_with_names
from server.errors import invalid
from server.models.service import TOKEN_BYTES, Service

router = APIRouter()

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
    ids = encode(text) if len(text) <= MAX_INLINE_CHARS else await asyncio.to_thread(encode, text)
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
    is_short = len(text) <= MAX_INLINE_CHARS
    ids = encode(text) if is_short else await asyncio.to_thread(encode, text)
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
