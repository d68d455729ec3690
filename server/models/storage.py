"""Where kept sessions are stored, and what vouches for their states, by the configuration.

Each model has its store, in a place of its own: that given as a path alone has
`ServerConfig.store` itself, and one with a name the folder ``models/NAME`` in it. The
first version has that place; any other gets ``versions/DIGEST`` in it.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from model.architectures.hybrid import MIN_CONTEXT, with_past
from model.checkpoint import Checkpoint
from model.state import StateLayout
from server.config import ModelSource, ServerConfig
from server.errors import RequestError
from server.models.backend import Backend
from server.runtime.async_engine import AsyncEngine
from server.sessions.loader import Elsewhere, Holding
from server.sessions.origins import PrefixTier
from server.sessions.sessions import Signing
from server.store.base import DiskFiles, Identity, Store, StoreError
from server.store.sqlite.database import DATABASE_FILE, Waiting, signing_key
from server.store.sqlite.files import PrefixFiles
from server.store.sqlite.maintenance import newest_identity, owner_of
from server.store.sqlite.store import LIMITS as MEMORY_LIMITS
from server.store.sqlite.store import MemoryStore, open_store
from server.store.table_store import StoreLimits

#: The value of ``store`` that stores nothing beyond the process.
MEMORY = "memory"

VERSIONS, MODELS = "versions", "models"
#: How long a request waits for a prefix on the disk, should that hang.
PREFIX_TIMEOUT_S = 5.0

logger = logging.getLogger("everstream.prefixes")

R = TypeVar("R")


class Shared(Protocol):
    """Opens stores that other replicas have as well: see `server.cluster.shared`."""

    def open_store(self, name: str, identity: Identity, limits: StoreLimits) -> Store: ...
    def signing_key(self, store: Store) -> bytes: ...
    def holding(self, async_engine: AsyncEngine, store: Store) -> Holding: ...
    def open_prefixes(
        self, name: str, identity: Identity, async_engine: AsyncEngine, bos_token_id: int
    ) -> PrefixTier: ...
    def owner_elsewhere(self, name: str, digest: str) -> Elsewhere: ...


class VersionInUse(RequestError):
    """The store of this very version is still open: it has been replaced and has not ended."""

    code = "model_in_use"
    message = "this version of the model still ends what it runs; try again later"


@dataclass(frozen=True, slots=True)
class Home:
    """The folders of one version: ``base`` is the model's, ``path`` this version's."""

    base: Path
    path: Path

    def owner_elsewhere(self, session: str) -> str | None:
        """Whose ``session`` is in the store of another version. Blocks."""
        for path in (self.base, *sorted(self.base.glob(f"{VERSIONS}/*"))):
            if path != self.path and (owner := _asked(owner_of, path, session)) is not None:
                return owner
        return None


def home_of(
    config: ServerConfig, source: ModelSource, digest: str, taken: Mapping[Path, str]
) -> Home | None:
    """Where the version with ``digest`` keeps its sessions; None: in memory.

    ``taken`` are the folders that this process has open, and the digests of whose they
    are. Raises `VersionInUse` where its own is among them.
    """
    if config.store in (None, MEMORY) or config.is_shared:
        return None
    root = Path(str(config.store)).expanduser()
    base = root / MODELS / source.name if source.is_named else root
    own = base / VERSIONS / digest[:16]
    if not own.is_dir() and (taken.get(base) or _digest_in(base)) in (None, digest):
        own = base
    if own in taken:
        raise VersionInUse
    return Home(base, own)


def open_storage(
    config: ServerConfig,
    name: str,
    checkpoint: Checkpoint,
    backend: Backend,
    home: Home | None,
    shared: Shared | None,
) -> tuple[Store, Signing]:
    """The store at ``home``, made if it is not there, a shared one, or one in memory.

    Raises `StoreError`, and `OSError` where the folder cannot be used.
    """
    identity = identity_of(checkpoint, backend)
    key = config.signing_key.encode() if config.signing_key else None
    limits = StoreLimits(
        retention_s=config.retention_s,
        max_log_tokens=config.max_log_tokens,
        max_bytes=config.store_size,
    )
    if shared is not None:
        joined = shared.open_store(name, identity, limits)
        return joined, Signing(identity, key or shared.signing_key(joined))
    if home is None:
        kept = replace(MEMORY_LIMITS, max_log_tokens=config.max_log_tokens)
        store = MemoryStore(identity, kept, max_state_bytes=config.store_memory)
        return store, Signing(identity, key or secrets.token_bytes(32))
    waiting = Waiting(lease_s=config.store_lease_s)
    opened = open_store(home.path, identity, config.durability, limits=limits, waiting=waiting)
    return opened, Signing(identity, key or signing_key(home.path))


def open_prefixes(
    config: ServerConfig,
    name: str,
    checkpoint: Checkpoint,
    backend: Backend,
    async_engine: AsyncEngine,
    home: Home | None,
    shared: Shared | None,
) -> PrefixTier | None:
    """The prefix cache's second tier, in the store, where the configuration gives it room.

    A server without it is as good, but slower: if the folder cannot be used, the log says so.
    """
    if config.prefix_disk == 0:
        return None
    identity, bos_token_id = identity_of(checkpoint, backend), checkpoint.config.bos_token_id
    if shared is not None:
        if config.prefix_disk is None:
            return None
        return shared.open_prefixes(name, identity, async_engine, bos_token_id)
    if home is None:
        return None
    try:
        files = PrefixFiles(
            home.path / "prefixes", DiskFiles(), identity, config.prefix_disk, config.retention_s
        )
    except OSError as error:
        logger.warning("the prefix cache is not kept on the disk: %s", error)
        return None
    return PrefixTier(async_engine, files, bos_token_id, timeout_s=PREFIX_TIMEOUT_S)


def has_prefix_tier(config: ServerConfig, store: Store) -> bool:
    """Whether prefixes outlive a restart: by default in a folder, in a database if asked for."""
    if config.is_shared:
        return bool(config.prefix_disk)
    return store.durable and config.prefix_disk != 0


def min_prefix_uses(config: ServerConfig) -> int:
    """The use at which a prefix is written: the first, where other replicas wait for it.

    Elsewhere at the third. The second one of a prompt's last state is only the next turn of its
    own conversation; so what one client sends writes nothing before the server stops.
    """
    return 1 if config.is_shared else 3


def identity_of(checkpoint: Checkpoint, backend: Backend) -> Identity:
    """What a state must have been made by for its session to continue, to the bit."""
    config, layout = checkpoint.config, StateLayout.of(checkpoint.config)
    shapes = StateLayout.of(with_past(config, MIN_CONTEXT, "stop")) if config.context else layout
    return Identity(
        model=checkpoint.digest,
        tokenizer=checkpoint.tokenizer.digest,
        backend=backend.name,
        dtype=backend.held,
        state_dtype=config.state_dtype,
        state_bytes=layout.fixed_bytes,
        layout=hashlib.sha256(repr(shapes).encode()).hexdigest(),
        group_bytes=layout.group_bytes,
        context=config.context,
        past=config.past,
    )


def _digest_in(path: Path) -> str | None:
    """The model whose states the store at ``path`` has got last; None where it has none."""
    found = _asked(newest_identity, path)
    return None if found is None else found.model


def _asked(ask: Callable[..., R | None], path: Path, *values: str) -> R | None:
    """What the store at ``path`` says; None where there is none, or of another format."""
    if not (path / DATABASE_FILE).is_file():
        return None
    with suppress(StoreError):
        return ask(path, *values)
    return None
