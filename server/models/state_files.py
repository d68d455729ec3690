"""A file with a state that sessions can begin with: one of ours, or one tuned elsewhere."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from model.architectures.config import Config
from model.checkpoint import CheckpointError
from model.files import open_file
from model.foreign.tuned_states import read_tuned_state
from model.state import StateLayout
from server.engine.token_ids import check_tokens
from server.engine.value import StateBlock
from server.errors import InvalidRequest
from server.store.base import Identity
from server.store.errors import ImportRefused
from server.store.named_state import NamedState, about_of, import_state, tuned_state
from server.store.portable import MAX_ABOUT_BYTES


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
