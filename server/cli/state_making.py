"""A state made of a prompt, without a server."""

from __future__ import annotations

import os
from pathlib import Path

from server.engine.engine import EngineConfig
from server.engine.types import Finished, Request
from server.errors import InternalFailure, InvalidRequest
from server.models.backend import Backend
from server.store.base import Identity
from server.store.named_state import NamedState, export_state, named_state

_OWNER = "state"


def read_prompt(backend: Backend, prompt: str, start: NamedState | None = None) -> NamedState:
    """The state after ``prompt``, which comes after that of ``start``; without one, begins a text.

    The bits are those of a session that reads the same text. Raises `InvalidRequest`.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty", "prompt")
    engine = backend.engine(1, EngineConfig(new_id=lambda: _OWNER))
    if start is None:
        session = engine.create_session(_OWNER, 0.0)
    else:
        session = engine.adopt(start.value, _OWNER, 0.0)
    tokenizer = backend.tokenizer
    encode = tokenizer.encode_continuation if session.position else tokenizer.encode
    tokens = tuple(encode(prompt))
    engine.submit(Request("read", _OWNER, tokens, None, session=session.session), 0.0)
    while engine.has_work():
        for event in engine.step(0.0):
            if isinstance(event, Finished) and event.error is not None:
                raise InternalFailure(event.error)
    before = "" if start is None else start.prompt
    return named_state(engine.value(session.session, _OWNER), before + prompt)


def write_state(path: Path, state: NamedState, identity: Identity) -> None:
    """Writes the file, whole or not at all, with the usual rights. Raises `OSError`."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.writelines(export_state(state, identity))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
