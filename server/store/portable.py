"""States that leave the store as files: signed sessions, named states, states of prompts."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

import orjson

from server.engine.prefixes import Prefix
from server.engine.session import Origin, SessionValue, StateBlock
from server.store.base import Chunk, Identity, ImportRefused, SnapshotBroken
from server.store.codec import Malformed, decode_value, encode
from server.store.snapshots import check_identity, check_sum, checksum, pack, seal, unpack, unseal

# -------------------------------------------------------------------------------------------------
# A session as one signed file, which another server of the same model can continue from.
#
# The file is safetensors: the state, and the session's fields as strings next to it.


SESSION_FORMAT = "everstream-session-1"
#: Bytes besides the state: much of a text that the state has not seen yet has room in them.
MAX_ABOUT_BYTES = 16 << 20
_MAX_UNDECODED_BYTES = 16


def export_session(value: SessionValue, identity: Identity, key: bytes) -> bytes:
    """The session without the request that it runs, signed with ``key``."""
    data = b"" if value.state is None else value.state.data
    fields = encode(replace(value, progress=None, state=None)).decode()
    about = {"format": SESSION_FORMAT, **identity.labels, "value": fields}
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
        if about.get("format") != SESSION_FORMAT:
            raise ImportRefused(f"the file's format is not {SESSION_FORMAT}")
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


# -------------------------------------------------------------------------------------------------
# A named state: what sessions begin with, and the file that it is kept in.
#
# The file is safetensors as an exported session is, without a signature: who may give states to
# a server is trusted with them. A session's own export can be taken for one.


NAMED_STATE_FORMAT = "everstream-named-state-1"
FORMATS = (NAMED_STATE_FORMAT, SESSION_FORMAT)


@dataclass(frozen=True, slots=True)
class NamedState:
    """``value`` is a session's before its first request: no id, no owner, its `Origin` set.

    ``prompt`` is the text that the state has read, where it was made of one.
    """

    value: SessionValue
    prompt: str = ""

    @property
    def digest(self) -> str:
        """Of the state and the tokens around it, 64 hex digits: the same for the same bits."""
        assert self.value.origin is not None, self.value
        return self.value.origin.digest

    @property
    def num_tokens(self) -> int:
        """Tokens of text that a session has before its first request."""
        return self.value.length


def named_state(value: SessionValue, prompt: str = "") -> NamedState:
    """The state of a session between two requests, for others to begin with.

    Raises `ImportRefused` where there is none, and where the session is within a request.
    """
    if value.state is None:
        raise ImportRefused("the session has read nothing: it has no state")
    if value.unfed or value.constraint is not None or value.progress is not None:
        raise ImportRefused("the session is within a request: a state is taken between two")
    if value.position and value.pending is None:
        raise ImportRefused("the session's last token is missing")
    origin = Origin(_digest(value, value.state), value.length)
    plain = SessionValue(
        id="",
        owner="",
        position=value.position,
        pending=value.pending,
        recent=value.recent,
        undecoded=value.undecoded,
        state=value.state,
        origin=origin,
    )
    return NamedState(plain, prompt)


def tuned_state(block: StateBlock) -> NamedState:
    """A state that has read no token: what state tuning has trained."""
    return named_state(SessionValue("", "", state=block))


def export_state(state: NamedState, identity: Identity) -> list[Chunk]:
    """The file of a state that belongs to ``identity``, in parts."""
    block = state.value.state
    assert block is not None, state
    fields = encode(replace(state.value, state=None)).decode()
    about = {
        "format": NAMED_STATE_FORMAT,
        **identity.labels,
        "value": fields,
        "prompt": state.prompt,
    }
    return seal(about, block.data)


def about_of(data: bytes) -> dict[str, str] | None:
    """What a file says about itself; None where it is not one of ours."""
    try:
        about, _ = unpack(data)
    except SnapshotBroken:
        return None
    return about if about.get("format") in FORMATS else None


def import_state(data: bytes, identity: Identity) -> NamedState:
    """The state of a file of `export_state`, or of an exported session.

    Raises `ImportRefused`, and `SnapshotMismatch` where it belongs to another model.
    """
    try:
        about, block = unpack(data)
        if about.get("format") not in FORMATS:
            raise ImportRefused(f"the file's format is not {NAMED_STATE_FORMAT}")
        check_sum({name: text for name, text in about.items() if name != "signature"}, block)
        check_identity(about, identity, "state")
        value = decode_value(about.get("value", ""))
    except (Malformed, SnapshotBroken) as error:
        raise ImportRefused(f"the file is not a state of everstream: {error}") from error
    if not is_possible(value, block.nbytes, identity):
        raise ImportRefused("the file's state is inconsistent: its parts do not fit together")
    if block.nbytes:
        value = replace(value, state=StateBlock(block))
    return named_state(value, about.get("prompt", ""))


def read_any_identity(data: bytes) -> tuple[NamedState, Identity]:
    """The state of a file, checked against what the file itself says it belongs to.

    Raises `ImportRefused`.
    """
    about = about_of(data)
    if about is None:
        raise ImportRefused("the file is not a state of everstream")
    try:
        identity = Identity.of(about)
    except (KeyError, ValueError) as error:
        raise ImportRefused("the file does not say what it belongs to") from error
    return import_state(data, identity), identity


def _digest(value: SessionValue, block: StateBlock) -> str:
    around = (value.position, value.pending, value.recent, value.undecoded.hex())
    digest = blake2b(orjson.dumps(around), digest_size=32)
    digest.update(block.data)
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------
# A prompt's state as a safetensors file, for the prefix cache's second tiers.


PREFIX_FORMAT = "everstream-prefix-1"


def encode_prefix(prefix: Prefix, identity: Identity) -> list[Chunk]:
    """The file of a prompt's state, in parts."""
    about = {
        "format": PREFIX_FORMAT,
        **identity.labels,
        "num_tokens": str(prefix.num_tokens),
        "position": str(prefix.position),
        "recent": orjson.dumps(prefix.recent).decode(),
    }
    return seal(about, prefix.block.data)


def decode_prefix(file: bytes, identity: Identity, key: bytes, num_tokens: int) -> Prefix:
    """The prefix of this ``key``, sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = unseal(file, PREFIX_FORMAT, identity)
    if about["num_tokens"] != str(num_tokens):
        raise SnapshotBroken(f"it is the state after {about['num_tokens']} tokens")
    recent = tuple(orjson.loads(about["recent"]))
    return Prefix(key, num_tokens, StateBlock(data), int(about["position"]), recent)
