from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from server import errors
from server.api import auth
from server.api import errors as api_errors
from server.api.errors import OUTCOMES, error_object, outcome
from server.api.openai.bodies import CompletionBody
from server.api.openai.responses import stored
from server.api.prepare import append_request, generate_request
from server.api.schemas.requests import AppendBody
from server.api.schemas.wire import parse_body
from server.api.stream import parse_message, request_id_of
from server.engine import prefixes
from server.engine.sampling import with_defaults
from server.engine.types import Request, SamplingParams
from server.errors import InvalidRequest, RequestError
from server.models import registry, storage
from server.models.service import RequestLimits, TenantTokenizers
from server.runtime import async_engine as async_engine
from server.runtime import queues as event_queue
from server.runtime import readers
from server.sessions import origins
from server.sessions import sessions as kept_sessions
from server.store import base as store_errors
from server.store.base import StoreTooNew
from tests.fakes import MODEL, ByteTokenizer

#: All that have errors, but for what only an operator sees.
MODULES = (
    *(errors, api_errors, store_errors, async_engine, event_queue, kept_sessions, auth),
    *(registry, origins, prefixes, stored, storage, readers),
)


def service_of(limits: RequestLimits, tokenizer: Any = None, **parts: Any) -> Any:
    tokenizer = tokenizer or ByteTokenizer()
    tokenizers = TenantTokenizers(tokenizer)
    parts |= {"tokenizer": tokenizer, "tokenizers": tokenizers, "limits": limits, "model": MODEL}
    return SimpleNamespace(**parts)


SERVICE = service_of(RequestLimits(max_prompt_tokens=100, max_tokens=1000))


def body(text: str) -> CompletionBody:
    return parse_body(CompletionBody, text.encode())


async def generated(text: str, num_choices: int = 1, service: Any = SERVICE) -> Request:
    """The request of a completion's body that has one prompt."""
    wire: Any = body(text)
    return await generate_request(service, "r", "me", wire.prompt, wire, wire, num_choices)


async def test_what_is_not_given_has_the_server_s_default() -> None:
    request = await generated('{"prompt": "hi", "seed": 5}')
    assert request.sampling == with_defaults(seed=5)
    assert (request.tokens, request.session, request.keep) == ((104, 105), None, False)


async def test_all_given_values_are_used() -> None:
    request = await generated(
        '{"prompt": [1, 2], "session": "s", "keep": true, "max_tokens": 9, "temperature": 0,'
        '"top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5,'
        '"presence_penalty": -2, "frequency_penalty": 0.25, "seed": 7, "typical_p": 0.9,'
        '"top_n_sigma": 1.5,'
        '"logit_bias": {"5": -100, "0": 1.5}, "top_logprobs": 3,'
        '"stop": ["a", "b"], "stop_token_ids": [4], "ignore_eos": true}'
    )
    assert request.sampling == SamplingParams(
        *(0, 3, 0.5, 0.1, 1.5, -2, 0.25, 7, 9, ("a", "b"), (4,)),
        ignore_eos=True,
        typical_p=0.9,
        top_n_sigma=1.5,
        logit_bias=((5, -100), (0, 1.5)),
        top_logprobs=3,
    )
    assert (request.tokens, request.session, request.keep) == ((1, 2), "s", True)


@pytest.mark.parametrize("value", ["0", "-1", "-0.5", "-1e308", "null"])
async def test_top_n_sigma_of_zero_and_below_is_off(value: str) -> None:
    request = await generated(f'{{"prompt": "hi", "top_n_sigma": {value}}}')
    assert request.sampling is not None
    assert request.sampling.top_n_sigma == 0.0


async def test_text_starts_a_session_and_token_ids_are_taken_as_they_are() -> None:
    assert (await generated('{"prompt": "hi"}')).start
    assert not (await generated('{"prompt": [104]}')).start
    fed = parse_body(AppendBody, b'{"text": "hi"}')
    assert (await append_request(SERVICE, "r", "me", "s", fed)).start


class SpaceInFront(ByteTokenizer):
    """Begins each text with a space that no one wrote."""

    puts_space_in_front = True

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return super().encode(" " + text, allow_special=allow_special)

    def encode_continuation(self, text: str) -> list[int]:
        return super().encode(text)


@pytest.mark.parametrize("length", [0, 3])
async def test_prompt_after_a_named_state_continues_its_text(length: int) -> None:
    async def start_of(name: str) -> Any:
        return SimpleNamespace(length=length)

    limits = RequestLimits(max_prompt_tokens=100, max_tokens=1000)
    sessions = SimpleNamespace(start_of=start_of)
    service = service_of(limits, SpaceInFront(), sessions=sessions)
    request = await generated('{"prompt": "hi", "state": "a"}', service=service)
    assert bytes(request.tokens) == (b"hi" if length else b" hi")


async def test_drawn_seeds_differ_and_survive_javascript() -> None:
    requests = [await generated('{"prompt": "hi"}') for _ in range(20)]
    seeds = {request.sampling.seed for request in requests if request.sampling}
    assert len(seeds) > 15
    assert max(seeds) < 2**53


async def test_long_text_is_encoded_the_same() -> None:
    service = service_of(RequestLimits(10**6, 10))
    text = '{"prompt": "' + "a" * 100_000 + '"}'
    assert len((await generated(text, service=service)).tokens) == 100_000


@pytest.mark.parametrize(
    "text",
    [
        "{" + ",".join(f'"k{n}": 1' for n in range(90_000)) + "}",
        '{"prompt": [' + "true," * 200_000 + "true]}",
        '{"prompt": "hi", "stop": [' + '"",' * 200_000 + '""]}',
        "[" * 1_000_000,
    ],
    ids=["unknown fields", "bad ids", "bad stops", "depth"],
)
def test_a_megabyte_of_mistakes_is_refused_in_no_time(text: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest):
        body(text)
    with pytest.raises(InvalidRequest):
        parse_message(text)
    assert time.process_time() - start < 0.2  # both; one look at each unknown field took 0.5


async def test_key_choices_and_scores_arrive() -> None:
    text = '{"prompt": "hi", "keep": true, "idempotency_key": "k"}'
    assert (await generated(text)).key == "k"
    assert (await generated(text, 3)).ids == ("r", "r/1", "r/2")
    fed = parse_body(AppendBody, b'{"text": "hi", "logprobs": true, "idempotency_key": "k"}')
    request = await append_request(SERVICE, "r", "me", "s", fed)
    assert (request.key, request.score, request.keep) == ("k", True, True)
    plain = parse_body(AppendBody, b'{"text": "hi"}')
    request = await append_request(SERVICE, "r", "me", "s", plain)
    assert (request.key, request.score) == (None, False)


async def test_key_wants_a_session_that_is_kept() -> None:
    for more in ('"keep": true', '"session": "s"', '"keep": null'):
        found = await generated(f'{{"prompt": "hi", "idempotency_key": "k", {more}}}')
        assert (found.key, found.keep or found.session == "s") == ("k", True)
    with pytest.raises(InvalidRequest, match="idempotency_key"):
        await generated('{"prompt": "hi", "idempotency_key": "k", "keep": false}')


def test_every_error_that_a_client_can_see_has_a_row_in_the_table() -> None:
    found = [kind for module in MODULES for kind in vars(module).values()]
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, RequestError)]
    at_start = {errors.RequestError.code, StoreTooNew.code}
    codes = {kind.code for kind in kinds} - at_start
    assert len(codes) >= 20
    assert codes == OUTCOMES.keys()


def test_unknown_code_is_our_own_failure() -> None:
    assert outcome(RequestError("odd")).status == 500
    assert error_object(RequestError("odd"))["type"] == "server_error"


@pytest.mark.parametrize(
    ("frame", "request_id"),
    [
        ('{"request_id": "a", "type": 5}', "a"),
        ("{", None),
        ('{"request_id": "a", "temperature": NaN}', "a"),
        ('{"request_id": "a", "prompt": "\\ud800"}', "a"),
        ('\ufeff{"request_id": "a", "prompt": "\\ud800"}', "a"),
        ('{"request_id": "a", "seed": 1e999}', "a"),
        ('{"request_id": "\\ud800"}', None),
        ('{"request_id": ""}', None),
        ('{"request_id": "' + "a" * 65 + '"}', None),
        ('{"request_id": 7}', None),
        ("[" * 100_000, None),
        ('{"request_id": "a", "seed": ' + "9" * 5000 + "}", None),
        ("nonsense", None),
        ('["request_id"]', None),
    ],
)
def test_request_id_of_a_frame_that_is_no_message(frame: str, request_id: str | None) -> None:
    assert request_id_of(frame) == request_id
