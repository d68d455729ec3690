"""Models: what is served; loaded, replaced and unloaded by keys with the scope ``admin``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from model.chat import PLAIN
from server.api.answers import json_response
from server.api.anthropic.routes import VERSION_HEADER, anthropic_model
from server.api.routing import ERRORS, KEY_ERRORS, NOT_FOUND, body_schema, models_of, service_for
from server.api.schemas import responses as answers
from server.api.schemas.wire import ModelPath, Wire, body_of
from server.config import MODEL_NAME
from server.engine.sampling import published
from server.models.registry import LoadingRefused, ModelChanges, Version
from server.models.service import Service

router = APIRouter()
admin_router = APIRouter(prefix="/v1/admin/models")


@router.get("/v1/models", response_model=answers.ModelList, responses=KEY_ERRORS)
async def models(request: Request) -> Response:
    """The models and their capacity, the default one first."""
    current = models_of(request).current.values()
    if VERSION_HEADER in request.headers:
        found = [anthropic_model(each.service) for each in current]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return json_response({"data": found, **ends})
    data = [model_object(each.service) for each in current]
    return json_response({"object": "list", "data": data})


@router.get(
    "/v1/models/{model}", response_model=answers.ModelAnswer, responses=KEY_ERRORS | NOT_FOUND
)
async def model(request: Request, model: str) -> Response:
    """One model and its capacity."""
    service = service_for(request, model)
    if VERSION_HEADER in request.headers:
        return json_response(anthropic_model(service))
    return json_response(model_object(service))


def model_object(service: Service) -> dict[str, Any]:
    """OpenAI's ``model``, with details of our own."""
    details, template = asdict(service.model), service.chat_template
    name, created_s = details.pop("name"), details.pop("created_s")
    del details["bos_token_id"]  # /tokenizer_info has it
    del details["hidden_size"]  # an embedding shows it
    about = {"id": name, "object": "model", "created": created_s, "owned_by": "everstream"}
    details |= {"chat": template.source != PLAIN, "thinking": template.thinking is not None}
    num_positions = service.num_positions
    meta = {
        "n_vocab": service.model.vocab_size,
        "n_ctx": num_positions,
        "n_ctx_train": num_positions,
        "n_embd": service.model.hidden_size,
        "n_params": service.model.parameters,
        "size": service.model.weight_bytes,
    }
    return {
        **about,
        "meta": meta,
        "everstream": {**details, "sampling": published(service.model.sampling)},
    }


class LoadModelBody(Wire):
    """`POST /v1/admin/models`: ``path`` is a folder under the server's ``--model-dir``."""

    name: str = Field(pattern=f"^{MODEL_NAME}$")
    path: ModelPath


class ReloadModelBody(Wire):
    """`POST /v1/admin/models/{name}/reload`: from where it is now, or from ``path``."""

    path: ModelPath | None = None


class ModelVersion(BaseModel):
    """A version of a model in this process. One that is retiring ends what it runs."""

    name: str
    digest: str
    status: Literal["serving", "retiring"]
    num_running: int
    num_waiting: int
    num_sessions: int


class ModelVersionList(BaseModel):
    """The answer to `GET /v1/admin/models`."""

    object: Literal["list"]
    data: list[ModelVersion]


class ModelReloaded(BaseModel):
    """``changed`` is False where the weights were the same, and everything continues."""

    model: answers.ModelAnswer
    changed: bool


class ModelDeleted(BaseModel):
    """A model that takes no new work."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]


@admin_router.get("", response_model=ModelVersionList, responses=ERRORS)
async def versions(request: Request) -> Response:
    """Every version that this process has, those that still end what they run too."""
    models = models_of(request)
    serving = [await _version(each, "serving") for each in list(models.current.values())]
    retiring = [await _version(each, "retiring") for each in list(models.retiring)]
    return json_response({"object": "list", "data": serving + retiring})


@admin_router.post(
    "",
    response_model=answers.ModelAnswer,
    responses=ERRORS,
    openapi_extra=body_schema(LoadModelBody),
)
async def load(request: Request) -> Response:
    """Serve one more model. It answers when the model takes work."""
    body = await body_of(LoadModelBody, request)
    version = await _changes(request).load(body.name, body.path)
    return json_response(model_object(version.service))


@admin_router.post(
    "/{name}/reload",
    response_model=ModelReloaded,
    responses=ERRORS,
    openapi_extra=body_schema(ReloadModelBody, required=False),
)
async def reload(request: Request, name: str) -> Response:
    """Serve a model's new version; what the old one runs ends there."""
    body = await body_of(ReloadModelBody, request, b"{}")
    reloaded = await _changes(request).reload(name, body.path)
    model = model_object(reloaded.version.service)
    return json_response({"model": model, "changed": reloaded.changed})


@admin_router.delete("/{name}", response_model=ModelDeleted, responses=ERRORS)
async def unload(request: Request, name: str) -> Response:
    """Take a model out; what it runs ends first."""
    _changes(request).unload(name)
    return json_response({"id": name, "object": "model", "deleted": True})


def _changes(request: Request) -> ModelChanges:
    changes: ModelChanges | None = request.app.state.changes
    if changes is None:
        raise LoadingRefused
    return changes


async def _version(version: Version, status: str) -> dict[str, Any]:
    stats = await version.async_engine.stats()
    return {
        "name": version.name,
        "digest": version.service.model.digest,
        "status": status,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_sessions": stats.num_sessions,
    }
