"""A named state: what sessions begin with, and the file that it is kept in.

The file is safetensors as an exported session is, without a signature: who may give states to
a server is trusted with them. A session's own export can be taken for one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

import orjson

from server.engine.value import Origin, SessionValue, StateBlock
from server.store import portable
from server.store.base import Identity
from server.store.codec import Malformed, decode_value, encode
from server.store.errors import ImportRefused, SnapshotBroken
from server.store.files import Chunk
from server.store.state_file import check_identity, check_sum, seal, unpack

FORMAT = "everstream-named-state-1"
FORMATS = (FORMAT, portable.FORMAT)


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
    about = {"format": FORMAT, **identity.labels, "value": fields, "prompt": state.prompt}
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
            raise ImportRefused(f"the file's format is not {FORMAT}")
        check_sum({name: text for name, text in about.items() if name != "signature"}, block)
        check_identity(about, identity, "state")
        value = decode_value(about.get("value", ""))
    except (Malformed, SnapshotBroken) as error:
        raise ImportRefused(f"the file is not a state of everstream: {error}") from error
    if not portable.is_possible(value, block.nbytes, identity):
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
