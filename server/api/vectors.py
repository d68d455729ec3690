"""Vectors of texts, as every API with embeddings has them: the requests, and the unit vector."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from server.api.prepare import prompt_tokens
from server.engine.types import Finished
from server.engine.types import Request as EngineRequest
from server.errors import InternalFailure, invalid
from server.models.service import FLOAT_BYTES, Service


async def embedding_requests(
    service: Service, id: str, owner: str, inputs: Sequence[str | list[int]], field: str
) -> list[EngineRequest]:
    """One for each of ``inputs``, the value of the client's ``field``.

    Raises `InvalidRequest` for an empty one, and where all vectors would be too large together.
    """
    requests: list[EngineRequest] = []
    for index, text in enumerate(inputs):
        tokens = await prompt_tokens(service, owner, text, field)
        await asyncio.sleep(0)  # others have their turn between the inputs
        if not tokens:
            raise invalid(field, "must not be empty")
        request = EngineRequest(
            *(f"{id}-{index}", owner, tokens),
            sampling=None,
            start=isinstance(text, str),
            embed=True,
            prompt_field=field,
        )
        requests.append(request)
    if not requests:
        raise invalid(field, "must not be empty")
    service.large_answers.check(num_bytes(service, requests), field, "the number of inputs")
    return requests


def num_bytes(service: Service, requests: Sequence[EngineRequest]) -> int:
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
