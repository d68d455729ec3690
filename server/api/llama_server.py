"""What llama.cpp's own clients ask of its server, next to OpenAI's routes.

`POST /completion` and `POST /infill`, whole or as server-sent events; what the server is; and
messages as the model reads them. Errors have the status as their code.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Annotated, Any, ClassVar, Literal

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Discriminator, Tag
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers
from typing_extensions import TypedDict

from server.api.answers import HEADERS, JsonAnswer, StreamAnswer, ended, json_response, sse
from server.api.chat.messages import Messages, TemplateKwargs, Tools
from server.api.chat.prepare import reasoning_of
from server.api.chat.prompt import prompt_of
from server.api.chat.reader import StopFinder
from server.api.errors import ErrorShape, error_object, outcome
from server.api.prepare import generate_request, renamed
from server.api.routing import (
    EVENT_STREAM,
    Dialect,
    body_schema,
    errors_as,
    keyed,
    models_of,
    service_for,
)
from server.api.schemas.requests import (
    MAX_BIASES,
    OTHER_SAMPLERS,
    PARTS_OF_OTHERS,
    Biases,
    Continuation,
    Drawing,
    JsonSchema,
    JsonSchemaFormat,
    MaxTokens,
    Sampling,
    Schema,
    TokenIds,
)
from server.api.schemas.wire import ModelName, Refusal, Wire, body_of
from server.engine.sampling import published
from server.engine.text import text_with_names
from server.engine.types import Event, Finished, Scored, Started, TokenEvent, Usage
from server.engine.types import Request as EngineRequest
from server.errors import InvalidRequest, RequestError, invalid
from server.models.service import TOKEN_BYTES, Service

#: A text, or its token ids.
LlamaPrompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("ids")],
    Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
]


def _paired(given: object) -> object:
    """``[[id, bias], [id, false]]`` as an object by id; false is never."""
    if not isinstance(given, list):
        return given
    if len(given) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"must have at most {MAX_BIASES} token ids")
    found: dict[str, Any] = {}
    for pair in given:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_id(pair[0]):
            raise PydanticCustomError("pairs", "must be pairs of a token id and a number or false")
        found[str(pair[0])] = -100.0 if pair[1] is False else pair[1]
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_NO_LIMITS = "a text ends by its tokens and stops"


class LlamaCompletionBody(Drawing):
    """`POST /completion`.

    ``samplers`` has no effect: there is one order, and each filter has a value that is off.
    """

    hints = frozenset(
        {
            *("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse"),
            *("timings_per_token", "return_progress", "samplers", "min_keep", "n_ctx"),
            *("post_sampling_probs", "user", "api_type", "api_server", "truncation_length"),
            "num_ctx",
            *("skip_special_tokens", "include_reasoning"),
            *PARTS_OF_OTHERS,
        }
    )
    other_names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "n_predict",
        "max_new_tokens": "n_predict",
        "typical": "typical_p",
        "nsigma": "top_n_sigma",
        "sampler_seed": "seed",
        "stopping_strings": "stop",
        "num_predict": "n_predict",
        "repetition_penalty_range": "repeat_last_n",
        "rep_pen": "repetition_penalty",
        "rep_pen_range": "repeat_last_n",
        "repeat_penalty": "repetition_penalty",
    }
    refused: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        "grammar_lazy": Refusal("GBNF is not read; use json_schema", (False,)),
        "add_bos_token": Refusal("a text gets the start token, token ids do not", (True,)),
        "n_probs": Refusal("use logprobs of POST /v1/completions", (0,)),
        "n_indent": Refusal(_NO_LIMITS, (0,)),
        "t_max_predict_ms": Refusal(_NO_LIMITS, (0, -1)),
        "n": Refusal("use n of POST /v1/completions", (1,)),
        "n_cmpl": Refusal("use n of POST /v1/completions", (1,)),
        "lora": Refusal("the operator chooses them at the start", ([],)),
        "image_data": Refusal("the model reads and writes text alone", ([],)),
        "multimodal_data": Refusal("the model reads and writes text alone", ([],)),
        "response_fields": Refusal("all fields are shown", ([],)),
        "system_prompt": Refusal("is part of prompt", ("",)),
    }

    model: ModelName | None = None
    prompt: LlamaPrompt
    n_predict: MaxTokens | None = None
    stream: bool | None = None
    json_schema: Schema | None = None
    logit_bias: Annotated[Biases, BeforeValidator(_paired)] | None = None
    return_tokens: bool | None = None
    top_logprobs: None = None


class InfillBody(LlamaCompletionBody):
    """`POST /infill`: what comes between two texts, of a model that has learnt that."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **LlamaCompletionBody.refused,
        "input_extra": Refusal("give it in input_prefix", ([],)),
    }

    input_prefix: str
    input_suffix: str
    prompt: str = ""


class RenderBody(Wire):
    """`POST /apply-template`."""

    model: ModelName | None = None
    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None


#: Names of the tokens before, behind and between, of the vocabularies that have them.
FILLS: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)
StopType = Literal["none", "eos", "limit", "word"]


class LlamaErrorDetail(TypedDict):
    """``code`` is the HTTP status; ``reason`` is the code of all our errors."""

    code: int
    message: str
    type: str
    param: str | None
    reason: str


class LlamaErrorAnswer(TypedDict):
    """Every error under these paths."""

    error: LlamaErrorDetail


def llama_error(error: RequestError) -> LlamaErrorAnswer:
    """The body, and the last event of a stream that cannot be finished."""
    ours = error_object(error)
    return {
        "error": {
            "code": outcome(error).status,
            "message": ours["message"],
            "type": ours["type"],
            "param": ours["param"],
            "reason": ours["code"],
        }
    }


ERRORS = ErrorShape(
    lambda error: orjson.dumps(llama_error(error)), lambda error: outcome(error).status
)


Json = dict[str, Any]


class LlamaWriter:
    """Writes the answer to ``request``, which ends by one of ``stops`` or otherwise.

    ``clock`` has seconds. With ``token_ids`` they are shown.
    """

    headers = HEADERS
    comment = b""

    def __init__(
        self,
        service: Service,
        request: EngineRequest,
        stops: Sequence[str],
        token_ids: bool,
        clock: Callable[[], float],
    ) -> None:
        self._service, self._request, self._clock = service, request, clock
        self._stops, self._shows_ids = StopFinder(stops, service.tokenizer), token_ids
        self._text, self._ids = StringIO(), list[int]()
        self._num_predicted, self._has_new_line = 0, False
        self._begun_s, self._first_s = clock(), 0.0
        self._last: Event | None = None

    # Whole

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        if isinstance(event, TokenEvent):
            self._read(event)
            self._text.write(event.text)
        elif not isinstance(event, Started | Scored):
            self._last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer; raises the `RequestError` that it ended by."""
        assert self._last is not None
        end = ended(self._last)
        self._text.write(end.text)
        yield orjson.dumps(self._end(end, self._text.getvalue()))

    # In events

    def token(self, event: TokenEvent) -> bytes:
        """The server-sent event for one token."""
        self._read(event)
        counts = {
            "tokens_predicted": self._num_predicted,
            "tokens_evaluated": len(self._request.tokens),
        }
        return sse({**self._piece(event.text), **counts})

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        if isinstance(event, Started | Scored):
            return b""
        try:
            end = ended(event)
        except RequestError as error:
            return self.error(error)
        rest = sse(self._piece(end.text)) if end.text else b""
        return rest + sse(self._end(end, ""))

    def end(self) -> bytes:
        """Nothing: the last event says that it is the last."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot be finished."""
        return sse(llama_error(error))

    # Both

    def _read(self, event: TokenEvent) -> None:
        if not self._first_s:
            self._first_s = self._clock()
        self._num_predicted += 1
        self._has_new_line |= "\n" in event.text
        self._stops.add(event)
        if self._shows_ids:
            self._ids.append(event.token_id)

    def _piece(self, text: str) -> Json:
        ids, self._ids = self._ids, []
        return {"index": 0, "content": text, "tokens": ids, "id_slot": 0, "stop": False}

    def _end(self, end: Finished, text: str) -> Json:
        usage, word = end.usage, self._stops.found() if end.finish_reason == "stop" else None
        stop_type: StopType = "limit"
        if end.finish_reason == "stop":
            stop_type = "eos" if word is None else "word"
        params = self._request.sampling
        settings = {} if params is None else {"seed": params.seed, "n_predict": params.max_tokens}
        return {
            **self._piece(text),
            "stop": True,
            "model": self._service.model.name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "generation_settings": settings,
            "has_new_line": self._has_new_line or "\n" in end.text,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word or "",
            "timings": self._timings(usage),
        }

    def _timings(self, usage: Usage) -> Json:
        now_s = self._clock()
        first_s = self._first_s or now_s
        num_read = usage.prompt_tokens - usage.cached_tokens
        return {
            "cache_n": usage.cached_tokens,
            **_speed("prompt", num_read, first_s - self._begun_s),
            **_speed("predicted", usage.completion_tokens, now_s - first_s),
        }


def _speed(what: str, number: int, seconds: float) -> Json:
    """Of ``number`` tokens; no time at all is taken for a microsecond."""
    milliseconds = max(1e3 * seconds, 1e-3)
    return {
        f"{what}_n": number,
        f"{what}_ms": milliseconds,
        f"{what}_per_token_ms": milliseconds / max(number, 1),
        f"{what}_per_second": 1e3 * number / milliseconds,
    }


#: What fields of the engine are called here.
NAMES = {"max_tokens": "n_predict", "response_format": "json_schema"}


class LlamaAnswer(TypedDict):
    """The whole answer, or the last event; the others have ``stop`` false."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    has_new_line: bool
    truncated: Literal[False]
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    timings: dict[str, float]


router = APIRouter()
_ERRORS = errors_as(LlamaErrorAnswer)


@router.post(
    "/completion",
    response_model=LlamaAnswer,
    responses=_ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(LlamaCompletionBody),
)
async def llama_completion(request: Request) -> Response:
    """Continue a prompt: JSON, or server-sent events with stream."""
    body = await body_of(LlamaCompletionBody, request)
    service = service_for(request, body.model)
    return await _answer(request, service, body, body.prompt)


@router.post(
    "/infill",
    response_model=LlamaAnswer,
    responses=_ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(InfillBody),
)
async def infill(request: Request) -> Response:
    """Fill in between two texts, where the model's vocabulary has the tokens for that."""
    body = await body_of(InfillBody, request)
    service = service_for(request, body.model)
    ids, encode = service.tokenizer.special_ids, service.tokenizer.encode_continuation
    marks = next((names for names in FILLS if all(name in ids for name in names)), None)
    if marks is None:
        raise invalid(
            "input_suffix", "is not supported: the model's vocabulary has no tokens to fill in"
        )
    before, behind, between = (ids[name] for name in marks)

    def filled() -> list[int]:
        prompt = [before, *encode(body.input_prefix), behind, *encode(body.input_suffix), between]
        return [*prompt, *encode(body.prompt)]

    return await _answer(request, service, body, await asyncio.to_thread(filled))


async def _answer(
    request: Request, service: Service, body: LlamaCompletionBody, prompt: str | Sequence[int]
) -> Response:
    wanted = keyed(request, Continuation.model_construct(model=body.model))
    id = f"llama-{secrets.token_hex(16)}"
    try:
        asked = await generate_request(
            service, id, request.state.owner, prompt, wanted, _sampling(body)
        )
    except InvalidRequest as error:
        raise renamed(error, NAMES) from None
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    writer = LlamaWriter(service, asked, stops, bool(body.return_tokens), time.monotonic)
    if body.stream:
        return StreamAnswer(service, asked, writer)
    num_bytes = 0 if asked.sampling is None else asked.sampling.max_tokens * TOKEN_BYTES
    service.large_answers.check(num_bytes, "n_predict", "n_predict")
    return JsonAnswer(service, asked, writer, num_bytes)


def _sampling(body: LlamaCompletionBody) -> Sampling:
    schema: JsonSchemaFormat | None = None
    if body.json_schema is not None:
        named = JsonSchema(name="schema", schema=body.json_schema, description=None)
        schema = JsonSchemaFormat(type="json_schema", json_schema=named)
    given: dict[str, Any] = {name: getattr(body, name) for name in Drawing.model_fields}
    return Sampling.model_construct(**given, max_tokens=body.n_predict, response_format=schema)


class LlamaSlot(TypedDict):
    """A place for one request that runs."""

    id: int
    n_ctx: int
    is_processing: bool


class LlamaProps(TypedDict):
    """The answer to `GET /props`."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class RenderedPrompt(TypedDict):
    """Messages in the model's template."""

    prompt: str


#: More requests than that do not run at once: see `server.engine.limits`.
MAX_SLOTS = 256


def _num_slots(service: Service) -> int:
    return min(service.model.max_sessions, MAX_SLOTS)


@router.get("/props", response_model=LlamaProps, responses=_ERRORS)
async def props(request: Request) -> Response:
    """What the default model is. A path is not told: ``model_path`` is its name."""
    service = models_of(request).default
    model, names = service.model, service.tokenizer.special_names
    n_ctx = service.num_positions
    found: LlamaProps = {
        "default_generation_settings": {"n_ctx": n_ctx, "params": published(model.sampling)},
        "total_slots": _num_slots(service),
        "model_alias": model.name,
        "model_path": model.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": service.chat_template.source,
        "bos_token": names.get(model.bos_token_id, ""),
        "eos_token": names.get(service.tokenizer.eos_token_id, ""),
        "build_info": f"everstream-{request.app.version}",
    }
    return json_response(found)


@router.get("/slots", response_model=list[LlamaSlot], responses=_ERRORS)
async def slots(request: Request) -> Response:
    """How many requests of the default model run, of as many as could; not whose."""
    service = models_of(request).default
    stats = await service.async_engine.stats()
    n_ctx = service.num_positions
    found: list[LlamaSlot] = [
        {"id": number, "n_ctx": n_ctx, "is_processing": number < stats.num_running}
        for number in range(_num_slots(service))
    ]
    return json_response(found)


@router.post(
    "/apply-template",
    response_model=RenderedPrompt,
    responses=_ERRORS,
    openapi_extra=body_schema(RenderBody),
)
async def apply_template(request: Request) -> Response:
    """Messages as the model reads them, special tokens by their names."""
    body = await body_of(RenderBody, request)
    service = service_for(request, body.model)
    reasoning = reasoning_of(service, None, "chat_template_kwargs", body.chat_template_kwargs)
    prompt = await prompt_of(
        service,
        body.messages,
        body.tools,
        body.add_generation_prompt,
        template_kwargs={**(body.chat_template_kwargs or {}), **reasoning.variables},
    )
    text = await service.large_answers.run(lambda: text_with_names(service.tokenizer, prompt.ids))
    return json_response({"prompt": text})


_PATHS = frozenset({"/completion", "/infill", "/props", "/slots", "/apply-template"})


def _owns(path: str, headers: Headers) -> bool:
    return path in _PATHS


DIALECT = Dialect(name="llama_server", router=router, owns=_owns, errors=ERRORS)
