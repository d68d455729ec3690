"""A session as one signed file, which another server of the same model can continue from.

The file is safetensors: the state, and the session's fields as strings next to it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import replace

import orjson

from server.engine.value import SessionValue, StateBlock
from server.store.base import Identity
from server.store.codec import Malformed, decode_value, encode
from server.store.errors import ImportRefused, SnapshotBroken
from server.store.files import Chunk
from server.store.state_file import check_identity, check_sum, checksum, pack, unpack

FORMAT = "everstream-session-1"
#: Bytes besides the state: much of a text that the state has not seen yet has room in them.
MAX_ABOUT_BYTES = 16 << 20
_MAX_UNDECODED_BYTES = 16


def export_session(value: SessionValue, identity: Identity, key: bytes) -> bytes:
    """The session without the request that it runs, signed with ``key``."""
    data = b"" if value.state is None else value.state.data
    fields = encode(replace(value, progress=None, state=None)).decode()
    about = {"format": FORMAT, **identity.labels, "value": fields}
    about["checksum"] = checksum(about, data)
    about["signature"] = _signature(about, data, key)
    return b"".join(pack(about, memoryview(data)))


def import_session(
    data: bytes, identity: Identity, key: bytes, *, trust_unsigned: bool = False
) -> SessionValue:
    """The session of a file that `export_session` has made with the same ``key``.

    With ``trust_unsigned`` the signature may be another one, unless the session's
    text is under a grammar. Its id and owner are
    those that it had: the caller gives it new ones. Raises `ImportRefused`, and
    `SnapshotMismatch` where it belongs to another model than ``identity``.
    """
    if len(data) > identity.max_bytes + MAX_ABOUT_BYTES:
        raise ImportRefused("the file is too large to be a session of this model")
    try:
        about, state = unpack(data)
        if about.get("format") != FORMAT:
            raise ImportRefused(f"the file's format is not {FORMAT}")
        is_ours = _is_signed(about, state, key)
        if not is_ours and not trust_unsigned:
            raise ImportRefused("the file is not signed with this server's key")
        check_sum({name: text for name, text in about.items() if name != "signature"}, state)
        check_identity(about, identity)
        value = decode_value(about.get("value", ""))
        if value.constraint is not None and not is_ours:
            raise ImportRefused("a session under a grammar must be signed")
    except (Malformed, SnapshotBroken) as error:
        raise ImportRefused(f"the file is not a session of everstream: {error}") from error
    if not is_possible(value, state.nbytes, identity):
        raise ImportRefused("the file's session is inconsistent: its parts do not fit together")
    if not state.nbytes:
        return value
    return replace(value, state=StateBlock(state))


def _signature(about: Mapping[str, str], data: Chunk, key: bytes) -> str:
    """Covers the strings of the header and the tensor, but not the signature itself."""
    mac = hmac.new(key, orjson.dumps({**about, "signature": ""}), "sha256")
    mac.update(data)
    return mac.hexdigest()


def _is_signed(about: Mapping[str, str], data: Chunk, key: bytes) -> bool:
    given = about.get("signature", "").encode()
    return hmac.compare_digest(_signature(about, data, key).encode(), given)


def is_possible(value: SessionValue, num_bytes: int, identity: Identity) -> bool:
    """Whether an engine could have been at ``value``; its tokens are left to the caller."""
    tokens = [token for segment in value.unfed for token in segment.tokens]
    pending = () if value.pending is None else (value.pending,)
    constrained = () if value.constraint is None else value.constraint.tokens
    return (
        num_bytes == (identity.used_bytes(value.position) if value.has_state else 0)
        and min(value.epoch, value.position, value.seq, value.log_index) >= 0
        and (value.origin is None or 0 <= value.origin.length <= value.length)
        and min((*tokens, *pending, *value.recent, *constrained), default=0) >= 0
        and len(constrained) <= value.length
        and all(
            segment.tokens and (not segment.plan or segment.plan >= len(segment.tokens))
            for segment in value.unfed
        )
        and (value.pending is not None or not value.unfed)
        and len(value.undecoded) <= _MAX_UNDECODED_BYTES
        and value.progress is None
    )
