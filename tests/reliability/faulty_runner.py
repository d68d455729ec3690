"""A runner that fails when it is told to, before it has changed anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.engine.runner import Draw, Feed, RowOutput, Runner, TokenScore
from server.engine.types import SamplingParams

#: What a call with these rows raises, if anything.
Fault = Callable[[Sequence[Feed]], Exception | None]


class FaultyRunner:
    """See `server.engine.runner.Runner`. ``fault`` may be exchanged between steps."""

    def __init__(self, runner: Runner, fault: Fault) -> None:
        self.fault = fault
        self._runner = runner

    @property
    def grid(self) -> tuple[int, ...]:
        return self._runner.grid

    def prepare(self, params: SamplingParams) -> Draw:
        return self._runner.prepare(params)

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        self._raise(feeds)
        return self._runner.run(feeds)

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        self._raise([feed])
        return self._runner.score(feed, following, num_top)

    def _raise(self, feeds: Sequence[Feed]) -> None:
        error = self.fault(feeds)
        if error is not None:
            raise error


def after(position: int, error: type[Exception] = RuntimeError) -> Fault:
    """Fails with any row whose text has more than ``position`` tokens, and says what is in it."""

    def fault(feeds: Sequence[Feed]) -> Exception | None:
        for feed in feeds:
            if feed.position > position:
                return error(f"a row at {feed.position}")
        return None

    return fault


def never(feeds: Sequence[Feed]) -> None:
    """No fault."""
