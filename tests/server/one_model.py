"""The models of a server that has one, around a fake engine.

Apart from `tests.server.harness`, which brings in clients that a server has no use for.
"""

from __future__ import annotations

from typing import cast

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer
from server.config import ServerConfig
from server.constraints.compiler import FormatCompiler
from server.models.registry import Models
from server.models.service import ModelInfo, make_service
from server.runtime.async_engine import AsyncEngine
from server.sessions.sessions import Signing
from server.store.base import Identity
from tests.fakes import MODEL, STATE_BYTES, ByteTokenizer

SIGNING = Signing(Identity(MODEL.digest, "t", "fake", "float32", STATE_BYTES, "l"), b"k" * 32)


def only(
    async_engine: AsyncEngine,
    config: ServerConfig,
    model: ModelInfo = MODEL,
    chat_template: ChatTemplate | None = None,
    constraints: FormatCompiler | None = None,
    tokenizer: ByteTokenizer | None = None,
) -> Models:
    """One model around a fake engine."""
    service = make_service(
        *(async_engine, cast(Tokenizer, tokenizer or ByteTokenizer()), model, config, SIGNING),
        chat_template=chat_template,
        constraints=constraints,
    )
    return Models.only(service, config.continue_on_start)
