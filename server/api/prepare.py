"""From the messages of clients to the requests of the engine: the only place that knows both.

A prompt that is text gets the model's start token where its session is empty; a prompt of
token ids is taken as it is. All functions raise `InvalidRequest`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeVar

from server.api.schemas.requests import (
    UNLIMITED,
    AppendBody,
    Continuation,
    Prefixed,
    ResponseFormat,
    Sampling,
)
from server.engine.prefixes import PrefixHandle
from server.engine.sampling import PENALTY_WINDOW, has_penalty, with_defaults
from server.engine.text import TokenArray, check_tokens
from server.engine.types import Dry, Finished, Request, SamplingParams, Turn
from server.errors import InternalFailure, InvalidRequest, invalid
from server.models.service import FLOAT_BYTES, Service
from server.sessions.origins import StateNotFound

# A shorter text is encoded in the event loop: it takes less time than a thread costs.
MAX_INLINE_CHARS = 2048

T = TypeVar("T")


async def in_thread_if_long(num_chars: float, call: Callable[[], T]) -> T:
    """The result of ``call``, which reads so many characters: in a thread where these are many."""
    return call() if num_chars <= MAX_INLINE_CHARS else await asyncio.to_thread(call)


NOT_PREFIXED = Prefixed()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt was made of, where it is not the client's own text or ids.

    ``field`` is the client's field; the answer is read as ``turn``. ``cache_at`` and
    ``prediction`` are those of `Request`.
    """

    field: str
    turn: Turn | None
    cache_at: tuple[int, ...]
    prediction: Sequence[int] = ()


NO_CONVERSATION = Conversation("prompt", None, ())


#: The fields of `Sampling` that make one `Dry`, but for its breakers.
_DRY = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
_OTHERS = {
    *("stop", "stop_token_ids", "logit_bias", "response_format", "dry_sequence_breakers"),
    "repeat_last_n",
}
#: Those that mean the same to the engine.
_SAME = sorted(Sampling.model_fields.keys() - _OTHERS - set(_DRY))
#: What no repetition has in it unless a client says otherwise, as in llama.cpp.
DRY_BREAKERS = ("\n", ":", '"', "*")


async def generate_request(
    service: Service,
    request_id: str,
    owner: str,
    prompt: str | Sequence[int] | None,
    wanted: Continuation,
    sampling: Sampling,
    num_choices: int = 1,
    ranked: bool = False,
    num_scored: int | None = None,
    prefixed: Prefixed = NOT_PREFIXED,
    conversation: Conversation = NO_CONVERSATION,
) -> Request:
    """The request of a completion. Draws a seed where the client gave none.

    One with a key has a session that is kept, if only to be found again by the key.
    With ``max_tokens`` 0 the prompt is only fed. ``ranked``: the choices will be
    compared. The prompt's tokens are scored unless ``num_scored`` is None: so many
    others are named in place of each.
    """
    session, key = wanted.session, wanted.idempotency_key
    is_begun = wanted.state is not None and await _has_text(service, wanted.state, wanted)
    if prefixed.prefix is not None:
        _check_prefix(service, prefixed.prefix, wanted)
        is_begun = True
    if prefixed.return_prefix and session is not None:
        raise invalid("return_prefix", "names what a new session reads: give it without session")
    continues = is_begun
    if session is not None:
        continues = await _continues(service, session, owner, prompt)
    tokens = TokenArray()
    if prompt is not None:
        tokens = await prompt_tokens(service, owner, prompt, conversation.field, continues)
    if key is not None and session is None and wanted.keep is False:
        raise invalid("idempotency_key", "needs a session that is kept: leave keep out")
    if not tokens and session is None and not is_begun:
        raise invalid(conversation.field, "must not be empty unless it continues a session")
    params = None
    if sampling.max_tokens != 0:
        params = await _sampling_params(service, sampling, ranked, owner, conversation.turn, key)
    return Request(
        request_id=request_id,
        owner=owner,
        tokens=tokens,
        sampling=params,
        session=session,
        keep=bool(wanted.keep) or (key is not None and session is None),
        start=prompt is None or isinstance(prompt, str),
        key=key,
        score=num_scored is not None,
        num_choices=num_choices,
        num_top=num_scored or 0,
        state=wanted.state,
        speculation=wanted.speculation != "off",
        prefix=prefixed.prefix,
        return_prefix=bool(prefixed.return_prefix),
        cache_at=conversation.cache_at,
        prediction=conversation.prediction,
        prompt_field=conversation.field,
    )


async def append_request(
    service: Service, request_id: str, owner: str, session: str, body: AppendBody
) -> Request:
    """The request that only feeds a session."""
    if body.text is not None and body.tokens is not None:
        raise invalid("tokens", "give either text or tokens, not both")
    field = "text" if body.tokens is None else "tokens"
    given = body.text if body.tokens is None else body.tokens
    continues = await _continues(service, session, owner, given)
    tokens = () if given is None else await prompt_tokens(service, owner, given, field, continues)
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
        prompt_field=field,
    )


async def prompt_tokens(
    service: Service,
    owner: str,
    prompt: str | Sequence[int],
    field: str,
    continues: bool = False,
) -> TokenArray:
    """The ids of ``prompt``, the value of ``field``, as they are fed.

    It begins a text, or ``continues`` one. What ``owner`` has sent before is known.
    """
    tokenizer, vocab_size = service.tokenizers.of(owner), service.tokenizer.vocab_size
    encode = tokenizer.encode_continuation if continues else tokenizer.encode

    def ids() -> TokenArray:
        """No list of them outlives this."""
        if isinstance(prompt, str):
            return TokenArray(encode(prompt))
        check_tokens(prompt, vocab_size, field)
        return TokenArray.of(prompt)

    if not isinstance(prompt, str):
        service.limits.check_prompt(len(prompt), field)
    found = await in_thread_if_long(len(prompt), ids)
    service.limits.check_prompt(len(found), field)
    return found


def check_ids(service: Service, ids: Sequence[int], field: str) -> None:
    """Raises where one is not of the vocabulary."""
    check_tokens(ids, service.tokenizer.vocab_size, field)


async def _has_text(service: Service, state: str, wanted: Continuation) -> bool:
    """Whether a new session with ``state`` has text before its prompt. Raises `StateNotFound`.

    Not where the work has a key: it may have been done before the state was deleted. Else
    the submission raises.
    """
    if wanted.session is not None:
        raise invalid("state", "is what a new session begins with: give it without session")
    try:
        return (await service.sessions.start_of(state)).length > 0
    except StateNotFound:
        if wanted.idempotency_key is None:
            raise
        return True


def _check_prefix(service: Service, prefix: str, wanted: Continuation) -> None:
    """Whether the server has it is seen where the request is submitted."""
    for name in ("session", "state"):
        if getattr(wanted, name) is not None:
            raise invalid("prefix", f"is what a new session begins with: give it without {name}")
    check_ids(service, PrefixHandle.parse(prefix).unfed, "prefix")


async def _continues(
    service: Service, session: str, owner: str, prompt: str | Sequence[int] | None
) -> bool:
    """Whether ``prompt`` follows other text; asked only where that makes a difference."""
    if not isinstance(prompt, str) or not service.tokenizer.puts_space_in_front:
        return False
    return (await service.sessions.info(session, owner)).position > 0


async def _grammar(service: Service, wanted: ResponseFormat, owner: str) -> str | None:
    if wanted.type == "text":
        return None
    if service.constraints is None:
        raise invalid("response_format", "is not supported by this server")
    return await service.constraints.grammar(wanted, owner)


async def _sampling_params(
    service: Service,
    sampling: Sampling,
    logprob: bool,
    owner: str,
    turn: Turn | None,
    key: str | None,
) -> SamplingParams:
    max_tokens, wanted = service.limits.max_tokens, sampling.response_format
    if sampling.max_tokens is not None and sampling.max_tokens > max_tokens:
        raise invalid("max_tokens", f"must be at most {max_tokens}")
    stop, stop_ids = sampling.stop or (), tuple(sampling.stop_token_ids or ())
    check_ids(service, stop_ids, "stop_token_ids")
    biases = {int(id): bias for id, bias in (sampling.logit_bias or {}).items()}
    check_ids(service, tuple(biases), "logit_bias")
    given: dict[str, Any] = {
        name: value for name in _SAME if (value := getattr(sampling, name)) is not None
    }
    if sampling.max_tokens == UNLIMITED:
        given["max_tokens"] = max_tokens
    if "seed" not in given:
        given["seed"] = drawn_seed(owner, key)
    params = with_defaults(
        service.model.sampling,
        **given,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=stop_ids,
        logit_bias=tuple(biases.items()),
        grammar=None if wanted is None else await _grammar(service, wanted, owner),
        logprob=logprob,
        turn=turn,
        dry=_dry(service, sampling),
    )
    is_shorter = sampling.repeat_last_n is not None and 0 <= sampling.repeat_last_n < PENALTY_WINDOW
    if is_shorter and has_penalty(replace(params, dry=None)):  # without one it says nothing
        raise invalid("repeat_last_n", f"penalties look at {PENALTY_WINDOW} tokens: give -1")
    return params


def _dry(service: Service, sampling: Sampling) -> Dry | None:
    given = {
        name.removeprefix("dry_"): value
        for name in _DRY
        if (value := getattr(sampling, name)) is not None
    }
    if not given.get("multiplier") or given.get("penalty_last_n") == 0:
        return None
    texts = sampling.dry_sequence_breakers
    # The token that a breaker has behind a letter, as in text-generation-webui.
    encode = service.tokenizer.encode_continuation
    ids = (encode(f"a{text}")[-1] for text in (DRY_BREAKERS if texts is None else texts))
    return Dry(**given, breakers=tuple(dict.fromkeys(ids)))


def drawn_seed(owner: str, key: str | None) -> int:
    """A seed for a client that gave none; a number that JavaScript has, too.

    Under a key always the same: work that is repeated where its log is lost comes to the same text.
    """
    if key is None:
        return secrets.randbits(32)
    return int.from_bytes(sha256(f"{owner}\0{key}".encode()).digest()[:4], "big")


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """``error`` with the name that its field has on a route, where that is another one."""
    name = names.get(error.param or "")
    return error if name is None else invalid(name, error.message.removeprefix(f"{error.param}: "))


async def embedding_requests(
    service: Service, id: str, owner: str, inputs: Sequence[str | list[int]], field: str
) -> list[Request]:
    """One for each of ``inputs``, the value of the client's ``field``.

    Raises `InvalidRequest` for an empty one, and where all vectors would be too large together.
    """
    requests: list[Request] = []
    for index, text in enumerate(inputs):
        tokens = await prompt_tokens(service, owner, text, field)
        await asyncio.sleep(0)  # others have their turn between the inputs
        if not tokens:
            raise invalid(field, "must not be empty")
        request = Request(
            *(f"{id}-{index}", owner, tokens),
            sampling=None,
            start=isinstance(text, str),
            embed=True,
            prompt_field=field,
        )
        requests.append(request)
    if not requests:
        raise invalid(field, "must not be empty")
    service.large_answers.check(vectors_bytes(service, requests), field, "the number of inputs")
    return requests


def vectors_bytes(service: Service, requests: Sequence[Request]) -> int:
    """What an answer with the vectors may take."""
    return len(requests) * service.model.hidden_size * FLOAT_BYTES


def unit_vector(end: Finished) -> list[float]:
    """The mean of the hidden states with the length 1. Raises `InternalFailure`."""
    if end.embedding is None:
        raise InternalFailure("the request was cancelled")
    length = math.hypot(*end.embedding)
    if not length > 0:
        raise InternalFailure("the mean of the hidden states has no direction")
    return [value / length for value in end.embedding]
