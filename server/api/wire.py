"""The base of all that comes over the wire: no unknown fields, no coercion, no NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from server.api.formats import few_fields
from server.api.openai.unsupported import Refusal


class Wire(BaseModel):
    """Base of all messages from a client.

    ``refused`` has the fields that other servers know and this one does not: see
    `server.api.openai.unsupported`.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, Refusal]] = {}

    _few_fields = model_validator(mode="before")(few_fields)
