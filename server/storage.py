"""Where kept sessions are stored, and what vouches for their states, by the configuration."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from model.checkpoint import Checkpoint
from model.state import StateLayout
from server.api.porter import Signing
from server.backend import Backend
from server.config import ServerConfig
from server.driver import Driver
from server.prefixes import PrefixTier
from server.store.base import Identity, Store
from server.store.files import DiskFiles
from server.store.lock import Waiting
from server.store.memory_store import MemoryStore
from server.store.prefix_files import PrefixFiles
from server.store.signing import signing_key
from server.store.sqlite_store import open_store
from server.store.upkeep import Limits

#: The value of ``store`` that stores nothing beyond the process.
MEMORY = "memory"


def open_storage(
    config: ServerConfig, checkpoint: Checkpoint, backend: Backend
) -> tuple[Store, Signing]:
    """The store that the configuration names, made if it is not there.

    Raises `StoreError`, and `OSError` where the folder cannot be had.
    """
    identity = identity_of(checkpoint, backend)
    key = config.signing_key.encode() if config.signing_key else None
    if config.store in (None, MEMORY):
        store = MemoryStore(
            max_state_bytes=config.store_memory, max_log_tokens=config.max_log_tokens
        )
        return store, Signing(identity, key or secrets.token_bytes(32))
    folder = _folder(config)
    limits = Limits(
        retention_s=config.retention_s,
        max_log_tokens=config.max_log_tokens,
        max_bytes=config.store_size,
    )
    waiting = Waiting(lease_s=config.store_lease_s)
    opened = open_store(folder, identity, config.durability, limits=limits, waiting=waiting)
    return opened, Signing(identity, key or signing_key(folder))


def open_prefixes(
    config: ServerConfig, checkpoint: Checkpoint, backend: Backend, driver: Driver
) -> PrefixTier | None:
    """The prefix cache's files beside the store, where the configuration gives them room."""
    if not config.prefix_disk or config.store in (None, MEMORY):
        return None
    identity = identity_of(checkpoint, backend)
    files = PrefixFiles(_folder(config) / "prefixes", DiskFiles(), identity, config.prefix_disk)
    return PrefixTier(driver, files, checkpoint.config.bos_token_id)


def _folder(config: ServerConfig) -> Path:
    assert config.store is not None
    return Path(config.store).expanduser()


def identity_of(checkpoint: Checkpoint, backend: Backend) -> Identity:
    """What a state must have been made by for its session to go on, to the bit."""
    layout = StateLayout.of(checkpoint.config)
    return Identity(
        model=checkpoint.digest,
        tokenizer=checkpoint.tokenizer.digest,
        backend=backend.name,
        dtype=backend.dtype,
        state_bytes=layout.num_bytes,
        layout=hashlib.sha256(repr(layout).encode()).hexdigest(),
    )
