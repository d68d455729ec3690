"""What every route needs of one model, put together once for each version of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from model.chat.template import ChatTemplate
from model.tokenizer import Tokenizer
from server.chat.renderer import Renderer
from server.config.settings import MIB, ServerConfig
from server.constraints.compiler import FormatCompiler
from server.errors import invalid
from server.models.info import ModelInfo
from server.models.large_answers import LargeAnswers
from server.models.tenant_tokenizers import TenantTokenizers
from server.runtime.async_engine import AsyncEngine
from server.sessions.idempotency import IdempotencyKeys
from server.sessions.loader import Elsewhere
from server.sessions.named_states import NamedStates
from server.sessions.ownership import Ownership
from server.sessions.prefix_tier import PrefixTier
from server.sessions.sessions import Sessions
from server.sessions.transfer import Signing, Transfer


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for; None where only its bytes are bounded."""

    max_prompt_tokens: int | None
    max_tokens: int
    max_body_bytes: int = MIB

    @property
    def max_model_len(self) -> int:
        """The most tokens that one request can have: no token is shorter than a byte."""
        return self.max_prompt_tokens or self.max_body_bytes

    def check_prompt(self, num_tokens: int, field: str, which: str = "") -> None:
        """Raises `InvalidRequest` where ``field`` has more tokens than it may have ``which``."""
        if self.max_prompt_tokens is not None and num_tokens > self.max_prompt_tokens:
            raise invalid(field, f"must have at most {self.max_prompt_tokens} tokens{which}")


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """The parts behind the routes, of one version of one model.

    ``reasoning`` is the setting of that name.
    """

    async_engine: AsyncEngine
    sessions: Sessions
    keys: IdempotencyKeys
    transfer: Transfer
    limits: RequestLimits
    model: ModelInfo
    tokenizer: Tokenizer
    tokenizers: TenantTokenizers
    states: NamedStates
    max_queued_events: int
    heartbeat_s: float
    max_socket_requests: int
    max_message_bytes: int
    large_answers: LargeAnswers
    chat_template: ChatTemplate = field(default_factory=ChatTemplate)
    renderer: Renderer = field(default_factory=Renderer)
    constraints: FormatCompiler | None = None
    reasoning: str | None = None

    async def close(self) -> None:
        """After the async engine has stopped: writes what is pending, ends child processes."""
        await asyncio.to_thread(self.sessions.close)
        self.large_answers.close()
        await self.renderer.close()
        if self.constraints is not None:
            await self.constraints.close()


def make_service(
    async_engine: AsyncEngine,
    tokenizer: Tokenizer,
    model: ModelInfo,
    config: ServerConfig,
    signing: Signing,
    prefixes: PrefixTier | None = None,
    elsewhere: Elsewhere | None = None,
    chat_template: ChatTemplate | None = None,
    constraints: FormatCompiler | None = None,
    ownership: Ownership | None = None,
    states: NamedStates | None = None,
) -> Service:
    """The service around ``async_engine``.

    ``elsewhere`` knows the sessions of other versions, ``ownership`` the other replicas.
    """
    if states is None:
        states = NamedStates(async_engine, signing.identity, {}, config.max_states)
    sessions = Sessions(async_engine, prefixes, elsewhere, ownership, states)
    return Service(
        async_engine=async_engine,
        sessions=sessions,
        keys=IdempotencyKeys(async_engine, sessions, ownership),
        transfer=Transfer(sessions, signing.identity, signing.key, config.trust_unsigned_state),
        limits=RequestLimits(
            config.max_prompt_tokens, config.max_tokens_limit, config.max_body_bytes
        ),
        model=model,
        tokenizer=tokenizer,
        tokenizers=TenantTokenizers(tokenizer),
        max_queued_events=config.max_queued_events,
        heartbeat_s=config.heartbeat_s,
        max_socket_requests=config.max_socket_requests,
        max_message_bytes=config.max_message_bytes,
        large_answers=LargeAnswers(config.max_answer_bytes),
        chat_template=chat_template or ChatTemplate(),
        constraints=constraints,
        reasoning=config.reasoning,
        states=states,
    )
