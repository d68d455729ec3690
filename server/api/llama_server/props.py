"""What the server is, as llama.cpp's clients ask for it: properties, slots, rendered prompts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answers import json_response
from server.api.chat.answer_options import reasoning_of
from server.api.chat.prompt import prompt_of
from server.api.llama_server.body import RenderBody
from server.api.llama_server.errors import LlamaErrorAnswer
from server.api.routing import body_schema, errors_as, models_of, service_for
from server.api.schemas.parse import body_of
from server.engine.sampling import published
from server.engine.text import text_with_names
from server.models.service import Service


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


router = APIRouter()
_ERRORS = errors_as(LlamaErrorAnswer)

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
