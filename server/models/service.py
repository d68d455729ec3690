"""What every route needs of one model, put together once for each version of it."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from model.chat import ChatTemplate
from model.state import StateLayout
from model.tokenizer import Tokenizer
from server.chat.renderer import Renderer
from server.config import MIB, ServerConfig
from server.constraints.compiler import FormatCompiler
from server.engine.sampling import DEFAULTS
from server.engine.types import SamplingParams
from server.errors import QueueFull, invalid
from server.runtime.async_engine import AsyncEngine
from server.sessions.loader import Elsewhere, Holding
from server.sessions.origins import NamedStates, PrefixTier
from server.sessions.sessions import IdempotencyKeys, Sessions, Signing, Transfer

# -------------------------------------------------------------------------------------------------
# What a client may know of the model that is served.


@dataclass(frozen=True, slots=True)
class StateTensorInfo:
    """A tensor that each of ``layers`` layers has in a session's state; ``bytes`` of all of them.

    ``shape`` is that of one layer: see `model.attention.specs`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: int
    bytes: int


def state_tensors(layout: StateLayout) -> tuple[StateTensorInfo, ...]:
    """What a session's state consists of, in the order of the layers."""
    layers = Counter((field.name, field.spec) for field in layout.fields)
    return tuple(
        StateTensorInfo(name, spec.shape, spec.dtype, count, spec.num_bytes * count)
        for (name, spec), count in layers.items()
    )


#: Of one weight.
_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One entry of `/v1/models`.

    A session has ``fixed_state_bytes``, and where the model has attention layers
    ``state_bytes_per_token`` more for each of the ``context`` positions that these keep, 0 where
    there are none; ``past`` says what happens at that bound, None where there is none.
    ``kv_cache_bytes_per_token`` is what a softmax model of the same shape would
    cache for every token, in 16 bits: see `model.state.kv_cache_bytes_per_token`.
    ``created_s`` is a Unix time, ``bos_token_id`` begins every text,
    ``hidden_size`` is the number of values of an embedding. ``sampling`` is how tokens are drawn
    where a request does not say.
    """

    name: str
    digest: str
    attention: str
    dtype: str
    parameters: int
    vocab_size: int
    state_bytes_per_session: int
    fixed_state_bytes: int
    state_bytes_per_token: int
    context: int
    past: str | None
    kv_cache_bytes_per_token: int
    max_sessions: int
    state: tuple[StateTensorInfo, ...]
    created_s: int
    bos_token_id: int = 0
    hidden_size: int = 0
    sampling: SamplingParams = DEFAULTS

    @property
    def weight_bytes(self) -> int:
        """About: scales of blocks are not counted, nor tables that have another type."""
        return int(self.parameters * _WEIGHT_BYTES.get(self.dtype.partition("+")[0], 2.0))


# -------------------------------------------------------------------------------------------------
# Answers that may become large: bounded before work starts, and written outside the event loop.
#
# The size of an answer is estimated from what its request asks for. One that may exceed the
# bound is refused with 400. An answer reserves its size while it is made, so that all of them
# together have a bound as well, and each tenant has its share.
#
# What has to be computed in one go is written by one thread, part by part. Answers take turns
# there, and the event loop only ever waits for the interpreter's lock.


#: Estimates, in bytes of JSON: the text of a token, a token with its log-probability, and a
#: number of an embedding.
TOKEN_BYTES = 8
#: Of an id in a list, as JSON.
ID_BYTES = 8
LOGPROB_BYTES = 80
FLOAT_BYTES = 22

#: All answers of a model may take so many times the bound of one; a tenant's, half of that.
AT_ONCE = 4

#: A smaller answer is written in the event loop: it takes less time than a thread costs.
MAX_INLINE_BYTES = 1 << 16

T = TypeVar("T")


class LargeAnswers:
    """The bounds on the answers of one model, and the thread that writes the large ones.

    All but the thread belongs to the event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._reserved: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, "answers")

    def check(self, num_bytes: int, param: str, fields: str) -> None:
        """Raises `InvalidRequest` that names ``param`` where an answer may become too large.

        ``fields`` are those that its size depends on.
        """
        if num_bytes > self._max_bytes:
            raise invalid(
                param,
                f"the answer may take {num_bytes} bytes, and the bound is {self._max_bytes} "
                f"(EVERSTREAM_MAX_ANSWER_BYTES); it grows with {fields}",
            )

    @contextmanager
    def reserve(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Held while an answer is made. Raises `QueueFull` where there are too many large ones."""
        max_bytes = AT_ONCE * self._max_bytes
        num_bytes = min(num_bytes, max_bytes)  # a response that is stored may be larger
        is_first = not self._reserved[owner]
        its_share = is_first or self._reserved[owner] + num_bytes <= max_bytes // 2
        if not its_share or self._reserved.total() + num_bytes > max_bytes:
            raise QueueFull("too many large answers are being made; try again later")
        self._reserved[owner] += num_bytes
        try:
            yield
        finally:
            self._reserved[owner] -= num_bytes
            if not self._reserved[owner]:
                del self._reserved[owner]

    async def run(self, call: Callable[[], T]) -> T:
        """The result of a short computation in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def parts(self, parts: Iterator[bytes], num_bytes: int) -> AsyncIterator[bytes]:
        """Those of ``parts`` that are not empty, computed in the thread where they may be large.

        An empty part is where other answers may have their turn.
        """
        if num_bytes <= MAX_INLINE_BYTES:
            for part in parts:
                yield part
            return

        def following() -> bytes | None:
            return next(parts, None)

        while (found := await self.run(following)) is not None:
            if found:
                yield found

    def close(self) -> None:
        """Ends the thread; what is in it is not needed any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


# -------------------------------------------------------------------------------------------------
# Tokenizers that remember, one for each tenant: what one sends makes no other one faster.


#: Of those that sent texts last; each may keep `model.tokenization.base.MAX_KNOWN_BYTES`.
MAX_TENANTS = 8


class TenantTokenizers:
    """Belongs to the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: The one that was used last comes last.
        self._by_owner = OrderedDict[str, Tokenizer]()

    def of(self, owner: str) -> Tokenizer:
        """That of ``owner``."""
        if owner not in self._by_owner:
            self._by_owner[owner] = self._tokenizer.remembering()
            if len(self._by_owner) > MAX_TENANTS:
                self._by_owner.popitem(last=False)
        self._by_owner.move_to_end(owner)
        return self._by_owner[owner]


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

    @property
    def num_positions(self) -> int:
        """The most tokens of a text: of the model where it has a bound, else of one request."""
        return self.model.context or self.limits.max_model_len

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
    holding: Holding | None = None,
    states: NamedStates | None = None,
) -> Service:
    """The service around ``async_engine``.

    ``elsewhere`` knows the sessions of other versions, ``holding`` the other replicas.
    """
    if states is None:
        states = NamedStates(async_engine, signing.identity, {}, config.max_states)
    sessions = Sessions(async_engine, prefixes, elsewhere, holding, states)
    return Service(
        async_engine=async_engine,
        sessions=sessions,
        keys=IdempotencyKeys(async_engine, sessions, holding),
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
