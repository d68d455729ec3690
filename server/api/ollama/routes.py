"""Ollama's routes and their answers: chats, prompts, vectors, and what the models are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from typing_extensions import TypedDict

from model.chat import PLAIN
from server.api.answers import JsonAnswer, LastEventsWriter, StreamAnswer, ended, json_response
from server.api.chat.prepare import PreparedChat, prepared
from server.api.chat.reader import AnswerPiece, AnswerReader, WholeAnswer
from server.api.errors import ErrorShape, error_object, outcome
from server.api.ollama.body import (
    NAMES,
    EmbedBody,
    GenerateBody,
    GeneratingBody,
    OldEmbeddingsBody,
    OllamaChatBody,
    OllamaRequest,
    PullBody,
    ShowBody,
    chat_of,
    chat_of_prompt,
    new_id,
    sampling_of_raw,
)
from server.api.prepare import (
    embedding_requests,
    generate_request,
    renamed,
    unit_vector,
    vectors_bytes,
)
from server.api.routing import (
    Dialect,
    answer_content,
    body_schema,
    errors_as,
    keyed,
    models_of,
    service_for,
)
from server.api.schemas.requests import Continuation
from server.api.schemas.wire import body_of
from server.engine.sampling import published
from server.engine.types import Event, Finished, Scored, Started, TokenEvent
from server.errors import InvalidRequest, RequestError, invalid
from server.models.service import TOKEN_BYTES, Service

# -------------------------------------------------------------------------------------------------
# Answers to a chat and to a prompt, whole or in lines of JSON, and errors.


class OllamaErrorAnswer(TypedDict):
    """Every error under these paths; ``code`` and ``param`` are those of all our errors."""

    error: str
    code: str
    param: str | None


def ollama_error(error: RequestError) -> OllamaErrorAnswer:
    """The body, and the last line of a stream that cannot be finished."""
    ours = error_object(error)
    return {"error": ours["message"], "code": ours["code"], "param": ours["param"]}


ERRORS = ErrorShape(
    lambda error: orjson.dumps(ollama_error(error)), lambda error: outcome(error).status
)


Json = dict[str, Any]

_HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def _shown_time() -> str:
    """Now, as Ollama writes times."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by it."""
    return max(1, int(seconds * 1e9))


class OllamaWriter:
    """Writes the answer to ``chat`` by the model ``name``; ``clock`` has seconds.

    It is a message, or with ``is_prompt`` a text. Calls come together in one line before the last.
    """

    headers = _HEADERS
    comment = b""

    def __init__(
        self, name: str, chat: PreparedChat, is_prompt: bool, clock: Callable[[], float]
    ) -> None:
        self._name, self._is_prompt, self._clock = name, is_prompt, clock
        self._reader = AnswerReader(chat.calls)
        self._answer = WholeAnswer(self._reader)
        self._is_kept = chat.request.keep
        self._begun_s, self._first_s = clock(), 0.0
        self._last: Event | None = None

    # Whole

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        if isinstance(event, TokenEvent):
            self._read(event)
        elif isinstance(event, Started):
            self._start(event)
        elif not isinstance(event, Scored):
            self._last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer; raises the `RequestError` that it ended by."""
        assert self._last is not None
        end = ended(self._last)
        self._answer.add(self._reader.finish(end))
        said = self._said(self._answer.text, self._answer.thoughts, self._calls())
        yield orjson.dumps(self._head() | said | self._end(end))

    # In lines

    def token(self, event: TokenEvent) -> bytes:
        """The line for one token, unless it is of a call or shows nothing."""
        self._read(event)
        return self._line()

    def chunks(self, event: Event) -> bytes:
        """The lines for one event of the engine."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        if isinstance(event, Scored):
            return b""
        if isinstance(event, Started):
            self._start(event)
            return b""
        try:
            end = ended(event)
        except RequestError as error:
            return self.error(error)
        self._answer.add(self._reader.finish(end))
        last = self._head() | self._said("", "", []) | self._end(end)
        return self._line(self._calls()) + _written(last)

    def end(self) -> bytes:
        """Nothing: the last line says that it is the last."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot be finished."""
        return _written(ollama_error(error))

    # Both

    def _start(self, event: Started) -> None:
        if self._is_kept:
            self._reader.start(event)

    def _read(self, event: TokenEvent) -> None:
        if not self._first_s:
            self._first_s = self._clock()
        pieces: list[AnswerPiece] = self._reader.read(event)
        self._answer.add(pieces)

    def _line(self, calls: list[Json] | None = None) -> bytes:
        """What has come since the last line; nothing where that is nothing."""
        text, thoughts = self._answer.take()
        if not (text or thoughts or calls):
            return b""
        return _written(self._head() | self._said(text, thoughts, calls or []) | {"done": False})

    def _head(self) -> Json:
        return {"model": self._name, "created_at": _shown_time()}

    def _said(self, text: str, thoughts: str, calls: list[Json]) -> Json:
        thought = {"thinking": thoughts} if thoughts else {}
        if self._is_prompt:
            return {"response": text, **thought}
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thought, **called}}

    def _calls(self) -> list[Json]:
        return [
            {"id": f"call_{call.id}", "function": {"name": call.name, "arguments": call.given}}
            for call in self._answer.calls
        ]

    def _end(self, end: Finished) -> Json:
        """Counts and times. ``prompt_cached_count`` is ours: what the prefix cache had."""
        now_s = self._clock()
        first_s = self._first_s or now_s
        return {
            "done": True,
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(now_s - self._begun_s),
            "load_duration": 0,
            "prompt_eval_count": end.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - self._begun_s),
            "eval_count": end.usage.completion_tokens,
            "eval_duration": _nanoseconds(now_s - first_s),
            "prompt_cached_count": end.usage.cached_tokens,
        }


def _written(line: Mapping[str, object]) -> bytes:
    return orjson.dumps(line) + b"\n"


# -------------------------------------------------------------------------------------------------
# Chats, prompts, vectors.


class OllamaAnswer(TypedDict, total=False):
    """The last line of a stream, or the whole answer; the others have ``done`` false."""

    model: str
    created_at: str
    message: dict[str, Any]
    response: str
    done: bool
    done_reason: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int
    prompt_cached_count: int


class OllamaVectors(TypedDict):
    """A unit vector for each input."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneVector(TypedDict):
    """The unit vector of one text."""

    embedding: list[float]


#: So many are not translated in the event loop.
MANY_MESSAGES = 64

router = APIRouter()
_ERRORS = errors_as(OllamaErrorAnswer)
_LINES = _ERRORS | answer_content("application/x-ndjson", type="string")


@router.post(
    "/api/chat",
    response_model=OllamaAnswer,
    responses=_LINES,
    openapi_extra=body_schema(OllamaChatBody),
)
async def ollama_chat(request: Request) -> Response:
    """Answer messages as Ollama does: lines of JSON, or one object without stream."""
    body = await body_of(OllamaChatBody, request)
    service, wanted = _place(request, body)
    if not body.messages:
        return _loaded(body, {"message": {"role": "assistant", "content": ""}})
    if len(body.messages) > MANY_MESSAGES:
        chat = await asyncio.to_thread(chat_of, service, body, wanted)
    else:
        chat = chat_of(service, body, wanted)
    made = await prepared(service, request.state.owner, chat)
    return _answer(service, body, made, is_prompt=False)


@router.post(
    "/api/generate",
    response_model=OllamaAnswer,
    responses=_LINES,
    openapi_extra=body_schema(GenerateBody),
)
async def ollama_generate(request: Request) -> Response:
    """Answer one prompt, in the model's template unless it is raw."""
    body = await body_of(GenerateBody, request)
    service, wanted = _place(request, body)
    if not body.prompt:
        return _loaded(body, {"response": ""})
    owner = request.state.owner
    if not body.raw:
        made = await prepared(service, owner, chat_of_prompt(service, body, wanted))
        return _answer(service, body, made, is_prompt=True)
    try:
        sampling = sampling_of_raw(body)
        raw = await generate_request(service, new_id(), owner, body.prompt, wanted, sampling)
    except InvalidRequest as error:
        raise renamed(error, NAMES) from None
    return _answer(service, body, PreparedChat(raw, None), is_prompt=True)


def _place(request: Request, body: OllamaRequest) -> tuple[Service, Continuation]:
    service = _ollama_service(request, body.model)
    return service, keyed(request, Continuation.model_construct(model=service.model.name))


def _answer(
    service: Service, body: GeneratingBody, made: PreparedChat, is_prompt: bool
) -> Response:
    writer = OllamaWriter(body.model, made, is_prompt, time.monotonic)
    if body.stream is not False:
        return StreamAnswer(service, made.request, writer)
    sampling = made.request.sampling
    size = 0 if sampling is None else sampling.max_tokens * TOKEN_BYTES
    service.large_answers.check(size, "options.num_predict", "options.num_predict")
    return JsonAnswer(service, made.request, writer, size)


def _loaded(body: OllamaRequest, said: dict[str, Any]) -> Response:
    """What Ollama says where it has loaded a model and nothing else: here all are loaded."""
    head = {"model": body.model, "created_at": _shown_time()}
    line = orjson.dumps({**head, **said, "done": True, "done_reason": "load"}) + b"\n"
    return Response(line, media_type=_HEADERS[0][1].decode())


@router.post(
    "/api/embed",
    response_model=OllamaVectors,
    responses=_ERRORS,
    openapi_extra=body_schema(EmbedBody),
)
async def ollama_embed(request: Request) -> Response:
    """A unit vector for each input."""
    body = await body_of(EmbedBody, request)
    service, begun_s = _ollama_service(request, body.model), time.monotonic()
    inputs = [body.input] if isinstance(body.input, str) else body.input
    requests = await embedding_requests(service, new_id(), request.state.owner, [*inputs], "input")

    def whole(lasts: Any) -> Any:
        ends = [ended(lasts[each.request_id]) for each in requests]
        yield orjson.dumps(
            {
                "model": body.model,
                "embeddings": [unit_vector(end) for end in ends],
                "total_duration": _nanoseconds(time.monotonic() - begun_s),
                "load_duration": 0,
                "prompt_eval_count": sum(end.usage.prompt_tokens for end in ends),
            }
        )

    return JsonAnswer(service, requests, LastEventsWriter(whole), vectors_bytes(service, requests))


@router.post(
    "/api/embeddings",
    response_model=OneVector,
    responses=_ERRORS,
    openapi_extra=body_schema(OldEmbeddingsBody),
)
async def ollama_embeddings(request: Request) -> Response:
    """The unit vector of one text."""
    body = await body_of(OldEmbeddingsBody, request)
    service = _ollama_service(request, body.model)
    (asked,) = await embedding_requests(
        service, new_id(), request.state.owner, [body.prompt], "prompt"
    )

    def whole(lasts: Any) -> Any:
        yield orjson.dumps({"embedding": unit_vector(ended(lasts[asked.request_id]))})

    return JsonAnswer(service, [asked], LastEventsWriter(whole), vectors_bytes(service, [asked]))


# -------------------------------------------------------------------------------------------------
# What Ollama's routes say of the models, of the version, and of what they do not do.

#: The version of Ollama's API that these routes follow: clients refuse older ones.
VERSION = "0.12.6"
#: What a name without a tag stands for.
TAG = ":latest"
#: When a loaded model is unloaded: never.
NEVER = "2318-01-01T00:00:00Z"


class OllamaDetails(TypedDict):
    """What a model is, in Ollama's words; ``format`` is ours."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict, total=False):
    """A model; ``size`` is that of its weights, from their number and type."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaModels(TypedDict):
    """All models."""

    models: list[OllamaModel]


class OllamaVersion(TypedDict):
    """The version of Ollama that these routes are like."""

    version: str


class ShownModel(TypedDict):
    """The answer to `POST /api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class PullStatus(TypedDict):
    """That a model is there."""

    status: str


def _ollama_service(request: Request, model: str) -> Service:
    """The service of a model by its name, which may have the usual tag. Raises `ModelNotFound`."""
    known = model in models_of(request).current
    return service_for(request, model if known else model.removesuffix(TAG))


@router.get("/api/version", response_model=OllamaVersion, responses=_ERRORS)
async def ollama_version(request: Request) -> Response:
    """Which of Ollama's versions these routes are like."""
    return json_response({"version": VERSION})


@router.get("/api/tags", response_model=OllamaModels, responses=_ERRORS)
async def ollama_tags(request: Request) -> Response:
    """The models."""
    served = models_of(request).current.values()
    return json_response({"models": [_model(version.service) for version in served]})


@router.get("/api/ps", response_model=OllamaModels, responses=_ERRORS)
async def ollama_ps(request: Request) -> Response:
    """The models that are loaded: all."""
    served = models_of(request).current.values()
    return json_response({"models": [_running(version.service) for version in served]})


@router.post(
    "/api/show",
    response_model=ShownModel,
    responses=_ERRORS,
    openapi_extra=body_schema(ShowBody),
)
async def ollama_show(request: Request) -> Response:
    """One model."""
    body = await body_of(ShowBody, request)
    name = body.model or body.name
    if name is None:
        raise invalid("model", "must be given")
    service = _ollama_service(request, name)
    model, template = service.model, service.chat_template
    capabilities = ["completion", "embedding"]
    if template.calls is not None:  # else tools are refused: no field of a chat forces a call
        capabilities.append("tools")
    if template.thinking is not None:
        capabilities.append("thinking")
    defaults = published(model.sampling)
    shown: ShownModel = {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "\n".join(
            f"{_parameter(name)} {value:g}" for name, value in defaults.items()
        ),
        "template": "" if template.source == PLAIN else template.source,
        "details": _details(service),
        "model_info": {
            "general.architecture": model.attention,
            "general.parameter_count": model.parameters,
            f"{model.attention}.context_length": service.num_positions,
            f"{model.attention}.embedding_length": model.hidden_size,
        },
        "capabilities": capabilities,
        "modified_at": _created(service),
    }
    return json_response(shown)


@router.post(
    "/api/pull", response_model=PullStatus, responses=_ERRORS, openapi_extra=body_schema(PullBody)
)
async def ollama_pull(request: Request) -> Response:
    """Says that a model is there, or that this server downloads none."""
    body = await body_of(PullBody, request)
    name = body.model or body.name or ""
    if name.removesuffix(TAG) not in models_of(request).current:
        raise InvalidRequest(f"model {name[:64]!r} is not served: {_OPERATOR}", "model")
    return json_response({"status": "success"})


_OPERATOR = (
    "models are loaded by the operator (everstream serve --model, POST /v1/admin/models), and"
    " not by clients"
)


@router.post("/api/create", responses=_ERRORS)
@router.post("/api/copy", responses=_ERRORS)
@router.post("/api/push", responses=_ERRORS)
@router.delete("/api/delete", responses=_ERRORS)
async def ollama_refused(request: Request) -> Response:
    """What would change which models there are."""
    raise InvalidRequest(f"{request.url.path} is not supported: {_OPERATOR}")


def _model(service: Service) -> OllamaModel:
    model = service.model
    name = model.name if ":" in model.name else model.name + TAG
    return {
        "name": name,
        "model": name,
        "modified_at": _created(service),
        "size": model.weight_bytes,
        "digest": model.digest,
        "details": _details(service),
    }


def _running(service: Service) -> OllamaModel:
    more: OllamaModel = {
        "expires_at": NEVER,
        "size_vram": 0,
        "context_length": service.num_positions,
    }
    return {**_model(service), **more}


def _details(service: Service) -> OllamaDetails:
    model = service.model
    return {
        "parent_model": "",
        "format": "everstream",
        "family": model.attention,
        "families": [model.attention],
        "parameter_size": _short(model.parameters),
        "quantization_level": model.dtype.upper(),
    }


def _short(number: int) -> str:
    """11.0M, 1.5B."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _created(service: Service) -> str:
    created = datetime.fromtimestamp(service.model.created_s, UTC)
    return created.isoformat().replace("+00:00", "Z")


def _parameter(name: str) -> str:
    return "repeat_penalty" if name == "repetition_penalty" else name


def _owns(path: str, headers: Headers) -> bool:
    return path.startswith("/api/")


DIALECT = Dialect(name="ollama", router=router, owns=_owns, errors=ERRORS)
