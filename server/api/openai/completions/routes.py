"""`POST /v1/completions`: one prompt or many, whole or in chunks, with log-probabilities."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from server.api.openai.bodies import CompletionBody, prompts_in
from server.api.openai.completions.parts import Completion, Shown
from server.api.openai.completions.writer import CompletionWriter
from server.api.openai.logprobs import TokenNames
from server.api.request_answer import JsonAnswer, SseAnswer
from server.api.routes.lookup import service_with
from server.api.schemas.openapi import ERRORS, EVENT_STREAM, body_schema
from server.api.schemas.parse import body_of
from server.api.translate import drawn_seed, generate_request
from server.engine.types import Request as EngineRequest
from server.errors import invalid
from server.models.large_answers import ID_BYTES, LOGPROB_BYTES, TOKEN_BYTES
from server.models.service import Service

#: Choices of one answer, of all prompts together.
MAX_ANSWER_CHOICES = 1024

OnePrompt = str | list[int]

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=Completion,
    response_model_exclude_unset=True,
    responses=ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(CompletionBody),
)
async def complete(request: Request) -> Response:
    """Generate text: JSON, or server-sent events with stream."""
    body = await body_of(CompletionBody, request)
    service = await service_with(request, body.session, body.model)
    if body.session is not None or body.keep:
        request.state.caller.require("sessions")
    num_top = body.top_logprobs if body.logprobs is None else body.logprobs
    _check(body, num_top)
    prompts = _prompts(body)
    num_drawn, ranked = body.best_of or body.n or 1, (body.best_of or 1) > (body.n or 1)
    # How many others are named in place of each token of the prompt; None: these are not asked.
    asked = (body.prompt_logprobs, num_top if body.echo else None)
    num_scored = max((num for num in asked if num is not None), default=None)
    seed = drawn_seed() if body.seed is None else body.seed  # one for all prompts
    sampling = body.model_copy(update={"seed": seed, "top_logprobs": num_top})
    name, requests = f"cmpl-{secrets.token_hex(16)}", list[EngineRequest]()
    for index, prompt in enumerate(prompts):
        each = await generate_request(
            service,
            name if index == 0 else f"{name}-{index}",
            request.state.owner,
            prompt,
            body,
            sampling,
            num_drawn,
            ranked,
            num_scored,
            prefixed=body,
        )
        requests.append(each)
        if len(prompts) > 1:
            await asyncio.sleep(0)  # others have their turn between the prompts
    # A thread decodes what is repeated.
    shown_of = partial(_shown, service, body, prompts, num_top)
    shown = await asyncio.to_thread(shown_of) if body.echo else shown_of()
    of_prompts, of_texts = _num_bytes(requests, shown)
    num_bytes = of_prompts if body.stream else of_prompts + of_texts
    param = "max_tokens" if of_texts > of_prompts else _of_prompt(body)
    fields = "the prompt, n, max_tokens, logprobs and prompt_logprobs"
    service.large_answers.check(num_bytes, param, fields)
    epoch_name = service.async_engine.epoch_name
    writer = CompletionWriter(requests, service.model.name, int(time.time()), epoch_name, shown)
    if body.stream:  # each choice repeats the prompt, which is written once
        return SseAnswer(service, requests, writer, of_prompts // shown.num)
    return JsonAnswer(service, requests, writer, num_bytes)


def _num_bytes(requests: Sequence[EngineRequest], shown: Shown) -> tuple[int, int]:
    """What an answer may take for its prompts, and how likely they were; and for its texts."""
    of_token = 0 if shown.logprobs is None else 1 + shown.logprobs
    of_prompt = 0 if shown.prompt_logprobs is None else 1 + shown.prompt_logprobs
    of_prompt += of_token if shown.echo else 0
    per_id = ID_BYTES if shown.token_ids else 0
    num_chars, num_fed = sum(map(len, shown.echo)), sum(len(each.tokens) for each in requests)
    num_drawn = sum(r.num_choices * r.sampling.max_tokens for r in requests if r.sampling)
    return (
        shown.num * (num_chars + num_fed * (of_prompt * LOGPROB_BYTES + per_id)),
        num_drawn * (TOKEN_BYTES + of_token * LOGPROB_BYTES + per_id),
    )


def _of_prompt(body: CompletionBody) -> str:
    """The field that makes most of what an answer says of its prompts."""
    if (body.n or 1) > 1:
        return "n"
    return "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"


def _prompts(body: CompletionBody) -> Sequence[OnePrompt | None]:
    """Each prompt by itself; None where a session continues without one."""
    if body.prompt is None:
        return [None]
    prompts = prompts_in(body.prompt)
    if len(prompts) > 1:
        if body.session is not None or body.keep:
            raise invalid("prompt", "must be one where the session is kept")
        if len(prompts) * (body.best_of or body.n or 1) > MAX_ANSWER_CHOICES:
            raise invalid("n", f"all prompts may have {MAX_ANSWER_CHOICES} choices together")
    return prompts


def _check(body: CompletionBody, num_top: int | None) -> None:
    """Raises `InvalidRequest` for fields that do not go together."""
    body.check(shows_logprobs=(num_top, body.prompt_logprobs) != (None, None))
    num_shown, num_drawn = body.n or 1, body.best_of or body.n or 1
    if body.return_prefix and body.prompt is not None and len(prompts_in(body.prompt)) > 1:
        raise invalid("return_prefix", "names one prompt: give it with one")
    if num_drawn < num_shown:
        raise invalid("best_of", "must be at least n")
    if num_drawn > num_shown and body.stream:
        raise invalid("best_of", "cannot be streamed: all must end before the best are known")
    if num_drawn > 1 and body.max_tokens == 0:
        raise invalid("best_of" if body.n is None else "n", "must be 1 where nothing is generated")
    if body.logprobs is not None and body.top_logprobs not in (None, body.logprobs):
        raise invalid("top_logprobs", "is another name for logprobs: give one of them")


def _shown(
    service: Service,
    body: CompletionBody,
    prompts: Sequence[OnePrompt | None],
    num_top: int | None,
) -> Shown:
    tokenizer = service.tokenizer
    echo: tuple[str, ...] = ()
    if body.echo:
        echo = tuple(p if isinstance(p, str) else tokenizer.decode(p or ()) for p in prompts)
    has_names = (num_top, body.prompt_logprobs) != (None, None)
    return Shown(
        num=body.n or 1,
        options=body.stream_options,
        echo=echo,
        logprobs=num_top,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        names=TokenNames(tokenizer) if has_names else None,
    )
