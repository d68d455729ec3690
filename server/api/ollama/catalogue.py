"""What Ollama's routes say of the models, of the version, and of what they do not do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from model.chat import PLAIN
from server.api.answers import json_response
from server.api.ollama.body import PullBody, ShowBody
from server.api.ollama.writer import OllamaErrorAnswer
from server.api.routing import body_schema, errors_as, models_of, service_for
from server.api.schemas.parse import body_of
from server.engine.sampling import published
from server.errors import InvalidRequest, invalid
from server.models.service import Service

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


router = APIRouter()
_ERRORS = errors_as(OllamaErrorAnswer)


def ollama_service(request: Request, model: str) -> Service:
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
    service = ollama_service(request, name)
    model, template = service.model, service.chat_template
    capabilities = ["completion", "tools", "embedding"]
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
