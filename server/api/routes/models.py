"""What models are served."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from model.chat.template import PLAIN
from server.api.routes.lookup import models_of, service_for
from server.api.schemas import responses as answers
from server.api.schemas.describe import KEY_ERRORS, NOT_FOUND
from server.api.streaming import json_response
from server.engine.sampling_defaults import published
from server.models.service import Service

router = APIRouter()


@router.get("/v1/models", response_model=answers.ModelList, responses=KEY_ERRORS)
async def models(request: Request) -> Response:
    """The models and their capacity, the default one first."""
    data = [model_object(each.service) for each in models_of(request).current.values()]
    return json_response({"object": "list", "data": data})


@router.get(
    "/v1/models/{model}", response_model=answers.ModelAnswer, responses=KEY_ERRORS | NOT_FOUND
)
async def model(request: Request, model: str) -> Response:
    """One model and its capacity."""
    return json_response(model_object(service_for(request, model)))


def model_object(service: Service) -> dict[str, Any]:
    """OpenAI's ``model``, with details of our own."""
    details, template = asdict(service.model), service.chat_template
    name, created_s = details.pop("name"), details.pop("created_s")
    del details["bos_token_id"]  # /tokenizer_info has it
    del details["hidden_size"]  # an embedding shows it
    about = {"id": name, "object": "model", "created": created_s, "owned_by": "everstream"}
    details |= {"chat": template.source != PLAIN, "thinking": template.thinking is not None}
    return {**about, "everstream": {**details, "sampling": published()}}
