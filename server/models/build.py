"""A model becomes something that can be served: engine, store, async engine, service."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from model.architectures.config import Config, has_sums
from model.bounds import Bound, bound_among, bounded, state_memory
from model.bundled_models import DEFAULT_MODEL
from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from model.checkpoint_files import NO_LORA, Lora
from model.config import ConfigError
from model.files import open_file
from model.foreign.tuned_states import read_tuned_state
from model.native.runtime import NativeError, Runtime
from model.state import StateLayout, kv_cache_bytes_per_token, stored_block
from model.tensor_spec import POSITION_BLOCK
from model.tokenizer import TokenizerError
from model.weights import num_parameters
from server.config import ModelSource, ServerConfig, set_environment
from server.constraints.compiler import FormatCompiler
from server.engine.drafts import (
    MAX_DRAFTS,
    MAX_STREAMS,
    MEASURED_ROWS,
    DraftCosts,
    Drafter,
    SuffixDrafter,
)
from server.engine.limits import EngineConfig
from server.engine.model_drafter import HeadDrafter, ModelDrafter
from server.engine.runner import CpuStatePool, Feed, NativeRunner, Runner
from server.engine.sampling import with_defaults
from server.engine.session import StateBlock
from server.engine.text import check_tokens
from server.engine.types import SamplingParams
from server.errors import InvalidRequest
from server.models.backend import Backend, BackendError, open_backend
from server.models.registry import ModelBroken, Models, Version
from server.models.service import ModelInfo, make_service, state_tensors
from server.models.storage import (
    Home,
    Shared,
    has_prefix_tier,
    home_of,
    min_prefix_uses,
    open_prefixes,
    open_storage,
)
from server.observability.metrics import Metrics
from server.observability.tracing import OFF, Tracer
from server.runtime.async_engine import AsyncEngine
from server.sessions.loader import Elsewhere
from server.sessions.origins import NamedStates
from server.store.base import Identity, ImportRefused, Store, StoreError
from server.store.states import MAX_ABOUT_BYTES, NamedState, about_of, import_state, tuned_state

# -------------------------------------------------------------------------------------------------
# A file with a state that sessions can begin with: one of ours, or one tuned elsewhere.


def max_file_bytes(state_bytes: int) -> int:
    """No file of a state of so many bytes is larger: a tuned one may have 64-bit numbers."""
    return 2 * state_bytes + MAX_ABOUT_BYTES


def read_state(
    path: Path, identity: Identity, config: Config, transposed: bool = False
) -> NamedState:
    """The state in the file at ``path``.

    A file of ours must belong to ``identity``, a tuned state must have the shapes of ``config``;
    only that may be ``transposed``: its matrices have keys as rows.
    Raises `ImportRefused`, `SnapshotMismatch` where a file of ours belongs to something else,
    and `OSError`.
    """
    with open_file(path) as file:
        data = file.read(max_file_bytes(identity.max_bytes) + 1)
    if len(data) > max_file_bytes(identity.max_bytes):
        raise ImportRefused("the file is too large to be a state of this model")
    if about_of(data) is None:
        return _tuned(path, config, transposed)
    if transposed:
        raise ImportRefused("the file is a state of everstream: only a tuned one is transposed")
    return _ours(data, identity, config)


def state_in(data: bytes, identity: Identity, config: Config) -> NamedState:
    """The same of the bytes of a file. Raises `ImportRefused` and `SnapshotMismatch`."""
    if len(data) > max_file_bytes(identity.max_bytes):
        raise ImportRefused("the file is too large to be a state of this model")
    if about_of(data) is not None:
        return _ours(data, identity, config)
    with TemporaryDirectory() as folder:  # tensors are read from a file
        path = Path(folder) / "file"
        path.write_bytes(data)
        return _tuned(path, config)


def _tuned(path: Path, config: Config, transposed: bool = False) -> NamedState:
    try:
        return tuned_state(StateBlock(read_tuned_state(path, config, transposed).data))
    except CheckpointError as error:
        raise ImportRefused(str(error).replace(str(path), path.name)) from error


def _ours(data: bytes, identity: Identity, config: Config) -> NamedState:
    state = import_state(data, identity)
    _check(state, config)
    return state


def _check(state: NamedState, config: Config) -> None:
    """Raises `ImportRefused` for what no engine of this model could have made."""
    try:
        check_tokens(state.value.known, config.vocab_size, "file")
    except InvalidRequest as error:
        raise ImportRefused(error.message) from error
    block = state.value.state
    assert block is not None, state
    if not StateLayout.of(config).is_finite(block.data):
        raise ImportRefused("the file's state is not finite")


# -------------------------------------------------------------------------------------------------
# Whether drafts pay for a model on this machine: calls of several rows are timed at start.


logger = logging.getLogger("everstream.speculation")

#: Of so many rounds the shortest time counts: the others were disturbed. No more are begun after
#: this time, since a large model waits for them.
NUM_ROUNDS, MAX_ROUNDS_S = 3, 1.0


class DraftModelError(ValueError):
    """A draft model that cannot draft for a model. The message begins with its flag."""


#: What times the calls of a runner: `measured_costs`.
Measure = Callable[[Runner, CpuStatePool], DraftCosts]


def measured_costs(
    runner: Runner, pool: CpuStatePool, clock: Callable[[], float] = time.perf_counter
) -> DraftCosts:
    """Times calls of one stream that draw after each row, in place and with a spare as target.

    What the second kind takes longer is the mean over all numbers of rows: single calls vary by
    more.
    """
    slot = pool.allocate()
    assert slot is not None, pool
    draw = runner.prepare(SamplingParams(temperature=0.0))
    position = most = MEASURED_ROWS[-1]
    tokens = [1] * most
    runner.run([Feed(slot, 0, tokens, draw, num_draws=most)])
    (spare,) = pool.spares([(slot, position, most)])
    calls = {(rows, to): float("inf") for rows in MEASURED_ROWS for to in (None, spare)}
    start_s = clock()
    for number in range(NUM_ROUNDS):
        if number and clock() - start_s > MAX_ROUNDS_S:
            break
        for rows, target in calls:
            feed = Feed(slot, position, tokens[:rows], draw, num_draws=rows, target=target)
            begin_s = clock()
            runner.run([feed])
            calls[rows, target] = min(calls[rows, target], clock() - begin_s)
    pool.free(slot)
    times_s, kept_s = ([calls[rows, to] for rows in MEASURED_ROWS] for to in (None, spare))
    return DraftCosts(times_s, max(0.0, sum(kept_s) - sum(times_s)) / len(MEASURED_ROWS))


def open_drafter(
    backend: Backend, draft: Backend | None = None, measure: Measure = measured_costs
) -> Drafter | None:
    """What drafts for ``backend``; None where its bits depend on chunks, or no draft would pay.

    ``draft`` is a small model that `check_draft_model` has accepted; without one the model's
    multi-token head drafts, if it has one.
    """
    if backend.name == "torch":  # whose runner also takes long to make
        logger.debug("no tokens are drafted: on torch the bits depend on the chunks")
        return None
    pool = CpuStatePool(StateLayout.of(backend.config), 1)
    runner = backend.make_runner(pool)
    costs = measure(runner, pool)
    times = ", ".join(f"{seconds * 1000:.2f}" for seconds in costs.times_s)
    pays = costs.ever_pays(MAX_DRAFTS)
    logger.debug(
        "%s: calls of %s rows take %s ms",
        "tokens are drafted where that pays" if pays else "no tokens are drafted, it would not pay",
        *(", ".join(map(str, costs.rows)), times),
    )
    if not pays:
        return None
    past = SuffixDrafter(costs, backend.tokenizer.token_bytes)
    if draft is not None:
        return _with_model(past, draft, measure)
    if backend.open_head is None:
        return past
    try:
        return _with_head(past, backend.open_head(), measure)
    except (CheckpointError, NativeError) as error:
        logger.info("the multi-token head is left out: %s", error)
        return past


def _with_model(past: SuffixDrafter, draft: Backend, measure: Measure) -> Drafter:
    """Without the small model where its drafts, were they always right, would not pay."""
    pool = CpuStatePool(StateLayout.of(draft.config), MAX_STREAMS)
    runner = draft.make_runner(pool)
    costs = _costs_with(past, "the draft model", measure(runner, pool))
    return past if costs is None else ModelDrafter(past, runner, pool, costs)


def _with_head(past: SuffixDrafter, head: Runtime, measure: Measure) -> Drafter:
    """The same with a multi-token head."""
    pool = CpuStatePool(head.layout, MAX_STREAMS)
    costs = _costs_with(past, "the multi-token head", measure(NativeRunner(head, pool), pool))
    return past if costs is None else HeadDrafter(past, head, pool, costs)


def _costs_with(past: SuffixDrafter, name: str, measured: DraftCosts) -> DraftCosts | None:
    """With the ``measured`` time of a draft; None where drafts that are right would not pay."""
    draft_s = measured.times_s[0]
    costs = past.costs.with_drafts_of(draft_s)
    pays = costs.ever_pays(MAX_DRAFTS)
    logger.info(
        "%s takes %.2f ms for a draft: %s",
        *(name, draft_s * 1000, "it drafts where that pays" if pays else "it drafts none"),
    )
    return costs if pays else None


def draft_state_bytes(config: Config) -> int:
    """Of the states of a small model or a head: one for each stream that drafts are made for."""
    return MAX_STREAMS * StateLayout.of(config).num_bytes


def check_draft_model(checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raises `DraftModelError` where ``draft`` cannot draft for ``checkpoint``."""
    if draft.config.context:
        raise DraftModelError("--draft-model: a model with attention layers cannot draft")
    mine, theirs = checkpoint.tokenizer, draft.tokenizer
    if mine.vocab_size != theirs.vocab_size or any(
        mine.token_bytes(id) != theirs.token_bytes(id) for id in range(mine.vocab_size)
    ):
        raise DraftModelError("--draft-model: it has another vocabulary than the model")


# -------------------------------------------------------------------------------------------------
# All of it blocks, and runs in any thread; nothing is started here.


#: What requests call the state that is merged into a model's file.
MERGED_STATE = "tuned"


class ModelBuilder:
    """Every model gets the limits of ``config`` for itself.

    ``has_bound`` says whether what the operator states of a bound was for any that it has read.
    """

    def __init__(
        self,
        config: ServerConfig,
        tracer: Tracer = OFF,
        shared: Shared | None = None,
        measure: Measure = measured_costs,
    ) -> None:
        self._config, self._tracer, self._shared = config, tracer, shared
        self._measure = measure
        self.has_bound = False

    def read(self, source: ModelSource) -> Checkpoint:
        """The checkpoint at ``source``. Raises `ModelBroken`."""
        try:
            checkpoint = load_model(source.source, source.tokenizer, source.lora)
            is_one, dtype = len(self._config.model) == 1, self._config.state_dtype
            if dtype != "float32" and (is_one or has_sums(checkpoint.config)):
                checkpoint = checkpoint.with_state_dtype(dtype)
            bound, *room = _room(self._config)
            if not is_one:
                bound = bound_among(checkpoint.config, bound)
            self.has_bound |= bool(bound)
            return self._with_head(bounded(checkpoint, bound, *room))
        except (CheckpointError, ConfigError, TokenizerError, OSError) as error:
            raise ModelBroken(str(error)) from error

    def _with_head(self, checkpoint: Checkpoint) -> Checkpoint:
        """Without its multi-token head where that cannot draft, or has no room for its states."""
        config, head = self._config, checkpoint.head
        if head is None:
            return checkpoint
        memory = config.state_memory or state_memory(checkpoint.config)
        memory -= draft_state_bytes(head.config) + StateLayout.of(checkpoint.config).num_bytes
        if config.backend == "torch" or config.speculation != "auto" or config.draft_model:
            return replace(checkpoint, head=None)
        if memory >= 0 or config.max_sessions:
            return checkpoint
        logger.info("the multi-token head is left out: --state-memory has no room for its states")
        return replace(checkpoint, head=None)

    def build(
        self,
        source: ModelSource,
        checkpoint: Checkpoint,
        taken: Mapping[Path, str],
        metrics: Metrics,
    ) -> Version:
        """A version that counts into ``metrics``; its store is open.

        ``taken`` are the folders of stores that are open, and the digests of whose they
        are. Raises `ModelBroken`, `StoreError` or `VersionInUse`.
        """
        config = self._config
        draft = self._draft_model(checkpoint)
        drafting = draft or checkpoint.head
        num_sessions = _num_sessions(
            *(source.source or source.name, checkpoint, config),
            None if drafting is None else drafting.config,
        )
        try:
            backend = open_backend(checkpoint, config.backend, config.dtype, config.threads)
        except (BackendError, CheckpointError, ConfigError) as error:
            raise ModelBroken(str(error)) from error
        home = home_of(config, source, checkpoint.digest, taken)
        try:
            store, signing = open_storage(
                config, source.name, checkpoint, backend, home, self._shared
            )
        except OSError as error:
            raise StoreError(f"the session store cannot be opened: {error.strerror}") from error
        try:
            constraints = FormatCompiler(backend.tokenizer)
            limits = _limits(checkpoint, config, store, constraints)
            if config.speculation == "auto":
                limits = replace(limits, drafter=self._drafter(backend, draft))
            engine = backend.engine(num_sessions, limits)
            fixed = _fixed_states(config, source.name, signing.identity, checkpoint)
        except OSError as error:
            store.close()
            message = f"--state-memory: {num_sessions} sessions: {error.strerror}"
            raise ModelBroken(message) from error
        except BaseException:  # the next attempt must find it free
            store.close()
            raise
        async_engine = AsyncEngine(engine, time.monotonic, metrics, store, self._tracer)
        service = make_service(
            async_engine,
            backend.tokenizer,
            _model_info(source, checkpoint, backend, num_sessions),
            config,
            signing,
            prefixes=open_prefixes(
                config, source.name, checkpoint, backend, async_engine, home, self._shared
            ),
            elsewhere=self._elsewhere(source, checkpoint, home),
            chat_template=checkpoint.chat_template,
            constraints=constraints,
            holding=None if self._shared is None else self._shared.holding(async_engine, store),
            states=NamedStates(
                *(async_engine, signing.identity, fixed, config.max_states),
                partial(state_in, identity=signing.identity, config=checkpoint.config),
            ),
        )
        return Version(source, service, home)

    def _draft_model(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """What drafts for ``checkpoint``. Raises `ModelBroken`, which names the flag."""
        source = self._config.draft_model
        if source is None:
            return None
        try:
            draft = load_model(source)
            check_draft_model(checkpoint, draft)
        except DraftModelError as error:
            raise ModelBroken(str(error)) from error
        except (CheckpointError, ConfigError, TokenizerError, OSError) as error:
            raise ModelBroken(f"--draft-model: {error}") from error
        return draft

    def _drafter(self, backend: Backend, draft: Checkpoint | None) -> Drafter | None:
        if draft is not None and backend.name == "torch":
            logger.warning("--draft-model is not used: it needs the native runtime")
            draft = None
        if draft is None:
            return open_drafter(backend, measure=self._measure)
        config = self._config
        try:
            small = open_backend(draft, "native", config.dtype, config.threads)
        except (BackendError, CheckpointError, ConfigError) as error:
            raise ModelBroken(f"--draft-model: {error}") from error
        return open_drafter(backend, small, self._measure)

    def _elsewhere(
        self, source: ModelSource, checkpoint: Checkpoint, home: Home | None
    ) -> Elsewhere | None:
        if self._shared is not None:
            return self._shared.owner_elsewhere(source.name, checkpoint.digest)
        return None if home is None else home.owner_elsewhere

    def refreshed(self, version: Version, source: ModelSource, checkpoint: Checkpoint) -> Version:
        """``version`` with what may change without its weights."""
        service = replace(version.service, chat_template=checkpoint.chat_template)
        return Version(source, service, version.home)


def build_models(
    config: ServerConfig,
    tracer: Tracer = OFF,
    shared: Shared | None = None,
    measure: Measure = measured_costs,
) -> tuple[Models, ModelBuilder]:
    """Every model that the configuration names. Raises as `ModelBuilder` does.

    ``shared`` opens the stores where ``config.is_shared``; ``measure`` times what drafts cost.
    """
    # It would start threads at the first text, and never work again where memory is short then.
    set_environment({"TOKENIZERS_PARALLELISM": "false"})
    assert (shared is not None) == config.is_shared, config.store and "a shared store"
    builder = ModelBuilder(config, tracer, shared, measure)
    versions: list[Version] = []
    for source in config.model:
        taken = {v.home.path: v.service.model.digest for v in versions if v.home}
        versions.append(builder.build(source, builder.read(source), taken, Metrics()))
    if Bound(config.context, config.past) and not builder.has_bound:
        raise ModelBroken("--context and --past are for models with attention layers: none has any")
    if config.state_dtype != "float32" and not any(_is_rounded(v) for v in versions):
        raise ModelBroken("--state-dtype bfloat16 is for models with recurrent sums: none has any")
    return Models(versions, config.continue_on_start), builder


def _is_rounded(version: Version) -> bool:
    return any(tensor.dtype == "bfloat16" for tensor in version.service.model.state)


def _room(config: ServerConfig) -> tuple[Bound, int | None, int | None]:
    """What an operator states of a bounded past and of the pool: see `model.bounds.bounded`."""
    bound = Bound(config.context, config.past)
    return bound, config.state_memory, config.max_sessions


def load_model(
    source: str | None, tokenizer: Path | None = None, lora: Lora = NO_LORA
) -> Checkpoint:
    """The checkpoint that ``source`` names, or the default. Raises what loading raises."""
    return load_checkpoint(source or DEFAULT_MODEL, tokenizer=tokenizer, lora=lora)


def _fixed_states(
    config: ServerConfig, model: str, identity: Identity, checkpoint: Checkpoint
) -> dict[str, NamedState]:
    """The state that is merged into a model, and what ``--state`` names. Raises `ModelBroken`."""
    found = {}
    if checkpoint.tuned_state is not None:
        merged = stored_block(checkpoint.tuned_state, checkpoint.config)
        found[MERGED_STATE] = tuned_state(StateBlock(merged.data))
    for name, (path, transposed) in config.states_of(model).items():
        try:
            found[name] = read_state(path, identity, checkpoint.config, transposed)
        except OSError as error:
            raise ModelBroken(f"--state {name}: {path}: {error.strerror}") from None
        except StoreError as error:
            raise ModelBroken(f"--state {name}: {path}: {error.message}") from error
    return found


def _limits(
    checkpoint: Checkpoint, config: ServerConfig, store: Store, constraints: FormatCompiler
) -> EngineConfig:
    layout = StateLayout.of(checkpoint.config)
    least = layout.used_bytes(1)
    return EngineConfig(
        new_id=lambda: f"sess_{config.session_tag}{secrets.token_hex(16)}",
        max_waiting=config.max_waiting,
        max_asleep=config.sleep_memory // (least if store.durable else layout.num_bytes),
        max_asleep_bytes=config.sleep_memory,
        session_ttl_s=config.session_ttl_s,
        can_evict=store.durable,
        save_interval=config.save_interval_tokens,
        max_detached_tokens=config.max_detached_tokens,
        max_prefixes=config.prefix_cache // least,
        max_prefix_bytes=config.prefix_cache,
        max_evicted_prefixes=64 if has_prefix_tier(config, store) else 0,
        min_prefix_uses=min_prefix_uses(config),
        matchers=constraints.matcher,
    )


def _num_sessions(
    source: str, checkpoint: Checkpoint, config: ServerConfig, drafting: Config | None
) -> int:
    """Slots of the pool, next to the states of what drafts for it, ``drafting``.

    Raises `ModelBroken` where the memory has room for none.
    """
    try:
        state_bytes = StateLayout.of(checkpoint.config).num_bytes
    except ConfigError as error:
        raise ModelBroken(f"{source}: {error}") from error
    memory = config.state_memory or state_memory(checkpoint.config)
    memory -= 0 if drafting is None else draft_state_bytes(drafting)
    num_sessions = config.max_sessions or memory // state_bytes
    if num_sessions < 1:
        raise ModelBroken(f"--state-memory: one session takes {state_bytes} bytes")
    return num_sessions


def _model_info(
    source: ModelSource, checkpoint: Checkpoint, backend: Backend, num_sessions: int
) -> ModelInfo:
    layout = StateLayout.of(checkpoint.config)
    return ModelInfo(
        name=source.name,
        digest=checkpoint.digest,
        attention=checkpoint.config.attention,
        dtype=backend.dtype,
        parameters=num_parameters(checkpoint.config),
        vocab_size=backend.config.vocab_size,
        state_bytes_per_session=layout.num_bytes,
        fixed_state_bytes=layout.fixed_bytes,
        state_bytes_per_token=layout.group_bytes // POSITION_BLOCK,
        context=checkpoint.config.context,
        past=checkpoint.config.past if checkpoint.config.context else None,
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(checkpoint.config),
        max_sessions=num_sessions,
        state=state_tensors(layout),
        created_s=int(time.time()),
        bos_token_id=checkpoint.config.bos_token_id,
        hidden_size=checkpoint.config.hidden_size,
        sampling=with_defaults(**checkpoint.sampling),
    )
