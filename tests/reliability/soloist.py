"""What a model says alone: what every stream of a server must equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from model.bundled_models import DEFAULT_MODEL
from model.checkpoint import load_checkpoint
from model.tensor_spec import StateDType
from server.engine.engine import EngineConfig
from server.engine.sampling import with_defaults
from server.engine.types import Request
from server.models.backend import open_backend
from tests.reliability.history import History, Log
from tests.reliability.streams import KeptStream
from tests.tiny import solo, tokens_of


class Soloist:
    """Runs generations one by one, in this process, as no server has ever seen them."""

    def __init__(self, model: Path | None = None, state_dtype: StateDType = "float32") -> None:
        checkpoint = load_checkpoint(model or DEFAULT_MODEL).with_state_dtype(state_dtype)
        backend = open_backend(checkpoint, "native", threads=1)
        limits = EngineConfig(new_id=lambda: "solo", max_running=1, max_waiting=1)
        self._tokenizer = backend.tokenizer
        self._engine = backend.engine(1, limits)

    def tokens(self, prompt: str, **sampling: Any) -> list[int]:
        """What a ``generate`` message with the same fields must give."""
        ids = tuple(self._tokenizer.encode(prompt))
        request = Request("solo", "nobody", ids, with_defaults(**sampling))
        return tokens_of(solo(self._engine, request))

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return b"".join(self._tokenizer.token_bytes(id) for id in ids).decode("utf-8", "replace")


def check_alone(
    streams: Iterable[KeptStream],
    history: History,
    log: Log,
    model: Path | None,
    state_dtype: StateDType = "float32",
) -> None:
    """The readers have all of the log, and each stream equals one that runs alone."""
    soloist = Soloist(model, state_dtype)
    history.check(log, decode=soloist.text)
    for stream in streams:
        body = stream.body
        if stream.frames[-1]["finish_reason"] == "cancelled":
            body = {**body, "max_tokens": len(stream.tokens)}
        assert stream.tokens == soloist.tokens(**body), stream.name
